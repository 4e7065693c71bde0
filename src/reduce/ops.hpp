// SPDX-License-Identifier: Apache-2.0
// The operations, for one element, and the loop around them. All of it is inlined into functions that are compiled for
// several instruction sets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "memory/buffer_view.hpp"
#include "reduce/loose.hpp"

namespace commlib {

enum class Bool : std::uint8_t {};  // a byte that is true when it is not 0

[[gnu::always_inline]] inline bool is_true(Bool value) noexcept { return static_cast<std::uint8_t>(value) != 0; }

// Where integers wrap without being undefined: unsigned, and not so narrow that they would be promoted to int.
template <class T>
using Wrapping = std::conditional_t<(sizeof(T) < sizeof(unsigned)), unsigned, std::make_unsigned_t<T>>;

struct Sum {
  template <class T>
  [[gnu::always_inline]] static T of(T a, T b) noexcept {
    if constexpr (std::is_same_v<T, Bool>) {
      return static_cast<Bool>(is_true(a) | is_true(b));
    } else if constexpr (std::is_floating_point_v<T>) {
      return a + b;
    } else {
      return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
    }
  }
};

// The last step of an Average: the sum of all before, and the last.
template <class Number>
struct Mean {
  Number divisor;

  template <class T>
  [[gnu::always_inline]] T of(T a, T b) const noexcept {
    return Sum::of(a, b) / divisor;
  }
};

struct Product {
  template <class T>
  [[gnu::always_inline]] static T of(T a, T b) noexcept {
    if constexpr (std::is_same_v<T, Bool>) {
      return static_cast<Bool>(is_true(a) & is_true(b));
    } else if constexpr (std::is_floating_point_v<T>) {
      return a * b;
    } else {
      return static_cast<T>(static_cast<Wrapping<T>>(a) * static_cast<Wrapping<T>>(b));
    }
  }
};

// A NaN in `a` is taken as such, and one in `b` because no comparison with it is true.
struct Min {
  template <class T>
  [[gnu::always_inline]] static T of(T a, T b) noexcept {
    if constexpr (std::is_same_v<T, Bool>) {
      return Product::of(a, b);
    } else {
      return (a < b) | (a != a) ? a : b;
    }
  }
};

struct Max {
  template <class T>
  [[gnu::always_inline]] static T of(T a, T b) noexcept {
    if constexpr (std::is_same_v<T, Bool>) {
      return Sum::of(a, b);
    } else {
      return (a > b) | (a != a) ? a : b;
    }
  }
};

// An element as a number, and back. 16-bit floats say themselves how (half.hpp); all others are numbers. Every NaN is
// stored as the same one: which of two NaNs an addition keeps would depend on how it was compiled.
template <class T>
[[gnu::always_inline]] inline auto load(T element) noexcept {
  if constexpr (std::is_class_v<T>) {
    return element.number();
  } else {
    return element;
  }
}
template <class T, class Number>
[[gnu::always_inline]] inline T store(Number number) noexcept {
  if constexpr (std::is_class_v<T>) {
    return T::of(number);
  } else if constexpr (std::is_floating_point_v<T>) {
    return number == number ? number : std::numeric_limits<T>::quiet_NaN();
  } else {
    return number;
  }
}

// to[i] = a[i] ∘ b[i]. `ivdep` says that each place of `to` is `a` or `b` or overlaps neither, which the compiler would
// else test at run time, to take a slow loop in place.
struct CombineLoop {
  template <class To, class A, class B, class Op>
  [[gnu::always_inline]] static void run(Op op, Outputs to, const void* a, const void* b, std::size_t count) noexcept {
    auto* const out = loose<To>(to.first);
    const auto* const left = loose<A>(a);
    const auto* const right = loose<B>(b);
    if (to.second != nullptr) {
      auto* const also = loose<To>(to.second);
#pragma GCC ivdep
      for (std::size_t i = 0; i < count; ++i) {
        const To result = store<To>(op.of(load(left[i].value), load(right[i].value)));
        out[i].value = result;
        also[i].value = result;
      }
      return;
    }
#pragma GCC ivdep
    for (std::size_t i = 0; i < count; ++i) {
      out[i].value = store<To>(op.of(load(left[i].value), load(right[i].value)));
    }
  }
};

// An Average is summed, and divided if `divisor` is not 1 (floats only).
template <class To, class A, class B, class Loop = CombineLoop>
[[gnu::always_inline]] inline void combine_as(ReduceOp op, double divisor, Outputs to, const void* a, const void* b,
                                              std::size_t count) noexcept {
  using Number = decltype(load(A{}));
  switch (op) {
    case ReduceOp::kAverage:
      if constexpr (std::is_floating_point_v<Number>) {
        const Mean<Number> mean{static_cast<Number>(divisor)};
        if (divisor != 1) return Loop::template run<To, A, B>(mean, to, a, b, count);
      }
      [[fallthrough]];
    case ReduceOp::kSum:
      return Loop::template run<To, A, B>(Sum{}, to, a, b, count);
    case ReduceOp::kMin:
      return Loop::template run<To, A, B>(Min{}, to, a, b, count);
    case ReduceOp::kMax:
      return Loop::template run<To, A, B>(Max{}, to, a, b, count);
    case ReduceOp::kProduct:
      return Loop::template run<To, A, B>(Product{}, to, a, b, count);
  }
}

}  // namespace commlib
