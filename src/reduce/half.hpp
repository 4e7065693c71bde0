// SPDX-License-Identifier: Apache-2.0
// 16-bit floats to float32 and back, to nearest even. NaN stays NaN, and is always the same quiet one when narrowed.
// The same bits on every processor.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "base/simd.hpp"
#include "memory/buffer_view.hpp"
#include "reduce/loose.hpp"

namespace commlib {

// In all of these `dtype` is kFloat16 or kBfloat16. 16-bit buffers may have any alignment; a destination may be the
// very address of a source of the same width, else it overlaps none. An Average is summed, and divided by `divisor`.

// to[i] = (s0[i] ∘ s1[i]) ∘ s2[i] …, of two sources or more, in float32, rounded once.
// `wide`, here and below: with the widest registers; only where WideHalfChunk::is_supported().
void combine_half(DType dtype, ReduceOp op, double divisor, Outputs to, Inputs in, std::size_t count,
                  bool wide = WideHalfChunk::is_supported()) noexcept;

void widen(DType dtype, float* to, const void* from, std::size_t count,
           bool wide = WideHalfChunk::is_supported()) noexcept;
void narrow(DType dtype, void* to, const float* from, std::size_t count,
            bool wide = WideHalfChunk::is_supported()) noexcept;

// As these three, without the help of special instructions; elements from `begin` on.
void combine_half_portable(DType dtype, ReduceOp op, double divisor, Outputs to, Inputs in, std::size_t begin,
                           std::size_t end) noexcept;
void widen_portable(DType dtype, float* to, const void* from, std::size_t count) noexcept;
void narrow_portable(DType dtype, void* to, const float* from, std::size_t count) noexcept;

// One element each. There are no branches, and a choice by mask cannot be made one as `?:` can, so that loops over them
// are vectorised.

[[nodiscard, gnu::always_inline]] inline std::uint32_t choose(bool condition, std::uint32_t yes,
                                                              std::uint32_t no) noexcept {
  const std::uint32_t mask = 0U - static_cast<std::uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

struct Float16 {
  std::uint16_t bits;

  [[nodiscard, gnu::always_inline]] inline float number() const noexcept {
    const std::int32_t magnitude = bits & 0x7FFF;
    std::uint32_t wide = (static_cast<std::uint32_t>(magnitude) << 13) + kRebias;
    wide += choose(magnitude >= 0x7C00, kRebias, 0);      // infinity and NaN: the largest exponent here, too
    wide |= choose(magnitude > 0x7C00, 0x0040'0000U, 0);  // a NaN comes out quiet
    const float subnormal = static_cast<float>(magnitude) * 0x1p-24F;  // exact
    wide = choose(magnitude < 0x0400, std::bit_cast<std::uint32_t>(subnormal), wide);
    return std::bit_cast<float>(wide | (bits & 0x8000U) << 16);
  }

  [[nodiscard, gnu::always_inline]] static inline Float16 of(float number) noexcept {
    const std::uint32_t wide = std::bit_cast<std::uint32_t>(number);
    const std::uint32_t magnitude = wide & 0x7FFF'FFFFU;
    const auto compared = static_cast<std::int32_t>(magnitude);  // processors compare signed numbers faster
    // Round up by a bit less than half, or by half if that makes it even. A carry into the exponent is right.
    std::uint32_t half = (magnitude - kRebias + 0x0FFFU + (magnitude >> 13 & 1U)) >> 13;
    // The sum with 0.5 has its last bit at 2^-24, the unit of a subnormal half: the addition does the rounding.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
    const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(shifted) - std::bit_cast<std::uint32_t>(0.5F);
    half = choose(compared < kLeastNormal, subnormal, half);
    half = choose(compared >= kTooLarge, 0x7C00U, half);
    half |= wide >> 16 & 0x8000U;
    return {static_cast<std::uint16_t>(choose(compared > kInfinity, 0x7E00U, half))};
  }

 private:
  static constexpr std::uint32_t kRebias = std::uint32_t{127 - 15} << 23;  // between the biases of the exponents
  static constexpr std::int32_t kLeastNormal = 0x3880'0000;                // as float32: 2^-14
  static constexpr std::int32_t kTooLarge = 0x4780'0000;                   // as float32: 2^16
  static constexpr std::int32_t kInfinity = 0x7F80'0000;
};

struct Bfloat16 {
  std::uint16_t bits;

  [[nodiscard, gnu::always_inline]] inline float number() const noexcept {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }

  [[nodiscard, gnu::always_inline]] static inline Bfloat16 of(float number) noexcept {
    const std::uint32_t wide = std::bit_cast<std::uint32_t>(number);
    const std::uint32_t rounded = wide + 0x7FFFU + (wide >> 16 & 1U);  // a carry into the exponent is right
    return {static_cast<std::uint16_t>(choose(number == number, rounded, 0x7FC0'0000U) >> 16)};
  }
};

}  // namespace commlib
