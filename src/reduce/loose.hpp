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

// Where the same elements are written to: one place, or two, while they are at hand.
struct Outputs {
  void* first;
  void* second;
  Outputs(void* one, void* other = nullptr) noexcept : first(one), second(other) {}  // NOLINT: a pointer is one place

  [[nodiscard]] Outputs behind(std::size_t bytes) const noexcept {
    return {static_cast<std::byte*>(first) + bytes,
            second != nullptr ? static_cast<std::byte*>(second) + bytes : nullptr};
  }
};

}  // namespace commlib
