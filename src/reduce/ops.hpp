// SPDX-License-Identifier: Apache-2.0
// The operations, for one element, and the loop around them. All of it is inlined into functions that are compiled for
// several instruction sets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
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

// In the body of a loop around a loop: the compiler must not merge (unroll and jam) rounds of the outer one, after which
// it would not vectorise the inner one any more. It costs nothing.
[[gnu::always_inline]] inline void keep_rounds_apart() noexcept { __asm__ volatile(""); }

// to[i] = (s0[i] ∘ s1[i]) ∘ s2[i] … for begin ≤ i < end; `last` is the operation of the last step. `ivdep` says that each
// place of `to` is a source or overlaps none, which the compiler would else test at run time, to take a slow loop in place.
struct CombineLoop {
  template <class T, class Op, class Last>
  [[gnu::always_inline]] static void run(Op op, Last last, Outputs to, Inputs in, std::size_t begin,
                                         std::size_t end) noexcept {
    if (in.n == 2 && to.other_count <= 1) return run_two<T>(last, to, in, begin, end);
    // A cache line of every source at a time: the processor fetches ahead in all of them at once, and needs a place for
    // none of them but the one in hand. With eight sources in eight places a third faster than source by source.
    // (`unroll 1`: turned into vectors first; unrolled first, some of these loops would stay scalar.)
    constexpr std::size_t kLine = 64 / sizeof(T);
    for (; begin + kLine <= end; begin += kLine) run_line<T, kLine>(op, last, to, in, begin);
    for (; begin < end; ++begin) run_line<T, 1>(op, last, to, in, begin);
  }

 private:
  template <class T, class Last>
  [[gnu::always_inline]] static void run_two(Last last, Outputs to, Inputs in, std::size_t begin,
                                             std::size_t end) noexcept {
    auto* const out = loose<T>(to.first);
    const auto* const left = loose<T>(in.sources[0]);
    const auto* const right = loose<T>(in.sources[1]);
    if (to.other_count != 0) {
      auto* const also = loose<T>(to.others[0]);
#pragma GCC ivdep
      for (std::size_t i = begin; i < end; ++i) {
        const T result = store<T>(last.of(load(left[i].value), load(right[i].value)));
        out[i].value = result;
        also[i].value = result;
      }
      return;
    }
#pragma GCC ivdep
    for (std::size_t i = begin; i < end; ++i) {
      out[i].value = store<T>(last.of(load(left[i].value), load(right[i].value)));
    }
  }

  template <class T, std::size_t kCount>
  [[gnu::always_inline]] static void put(Loose<T>* out, const T (&results)[kCount]) noexcept {
#pragma GCC unroll 1
    for (std::size_t i = 0; i < kCount; ++i) out[i].value = results[i];
  }

  template <class T, std::size_t kCount, class Op, class Last>
  [[gnu::always_inline]] static void run_line(Op op, Last last, Outputs to, Inputs in, std::size_t at) noexcept {
    using Number = decltype(load(T{}));
    Number line[kCount];
    const auto* const start = loose<T>(in.sources[0]) + at;
#pragma GCC unroll 1
    for (std::size_t i = 0; i < kCount; ++i) line[i] = load(start[i].value);
    for (std::size_t source = 1; source + 1 < in.n; ++source) {
      const auto* const from = loose<T>(in.sources[source]) + at;
      keep_rounds_apart();
#pragma GCC unroll 1
      for (std::size_t i = 0; i < kCount; ++i) line[i] = op.of(line[i], load(from[i].value));
    }
    const auto* const from = loose<T>(in.sources[in.n - 1]) + at;
    T results[kCount];
#pragma GCC unroll 1
    for (std::size_t i = 0; i < kCount; ++i) results[i] = store<T>(last.of(line[i], load(from[i].value)));
    put(loose<T>(to.first) + at, results);
    for (std::size_t other = 0; other < to.other_count; ++other) put(loose<T>(to.others[other]) + at, results);
  }
};

// An Average is summed, and divided if `divisor` is not 1 (floats only).
template <class T, class Loop = CombineLoop>
[[gnu::always_inline]] inline void combine_as(ReduceOp op, double divisor, Outputs to, Inputs in, std::size_t begin,
                                              std::size_t end) noexcept {
  using Number = decltype(load(T{}));
  switch (op) {
    case ReduceOp::kAverage:
      if constexpr (std::is_floating_point_v<Number>) {
        const Mean<Number> mean{static_cast<Number>(divisor)};
        if (divisor != 1) return Loop::template run<T>(Sum{}, mean, to, in, begin, end);
      }
      [[fallthrough]];
    case ReduceOp::kSum:
      return Loop::template run<T>(Sum{}, Sum{}, to, in, begin, end);
    case ReduceOp::kMin:
      return Loop::template run<T>(Min{}, Min{}, to, in, begin, end);
    case ReduceOp::kMax:
      return Loop::template run<T>(Max{}, Max{}, to, in, begin, end);
    case ReduceOp::kProduct:
      return Loop::template run<T>(Product{}, Product{}, to, in, begin, end);
  }
}

}  // namespace commlib
