// SPDX-License-Identifier: Apache-2.0
// Elements in somebody else's bytes: at any alignment, whatever type the owner thinks they have.
#pragma once

#include <cstddef>
#include <type_traits>

namespace commlib {

template <class T>
struct __attribute__((packed, may_alias)) Loose {
  T value;
};

template <class T>
[[nodiscard]] inline Loose<T>* loose(void* data) noexcept {
  static_assert(sizeof(Loose<T>) == sizeof(T) && alignof(Loose<T>) == 1);
  return static_cast<Loose<T>*>(data);
}

template <class T>
[[nodiscard]] inline const Loose<T>* loose(const void* data) noexcept {
  return static_cast<const Loose<T>*>(data);
}

// Where the same elements are read from, and where they are all written to while they are at hand. Views.
struct Inputs {
  const void* const* sources;
  std::size_t n;  // ≥ 1
};

struct Outputs {
  void* first;
  void* const* others;
  std::size_t other_count;
  Outputs(void* one, void* const* more = nullptr,
          std::size_t more_count = 0) noexcept  // NOLINT: a pointer is one place
      : first(one), others(more), other_count(more_count) {}
};

}  // namespace commlib
