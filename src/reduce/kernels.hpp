// SPDX-License-Identifier: Apache-2.0
// The loops under reduce.hpp: one pass, one operation. Each is compiled for several instruction sets; all of them give the
// same bits, also for the odd elements at the end. Buffers may have any alignment; a destination may be the very address
// of a source. Where there are several, all get all elements.
#pragma once

#include <cstddef>
#include <cstdint>

#include "memory/buffer_view.hpp"
#include "reduce/loose.hpp"

namespace commlib {

// to[i] = (s0[i] ∘ s1[i]) ∘ s2[i] …, of two sources or more. An Average is summed, and that of floats divided by `divisor`.
// 16-bit floats in float32, rounded once. Every NaN comes out as the same one.
void combine(DType dtype, ReduceOp op, double divisor, Outputs to, Inputs in, std::size_t count) noexcept;

// to[i] = (from[i] is not zero)
void normalise_bools(void* to, const void* from, std::size_t count) noexcept;

// to[i] = from[i] / divisor, for float32 and float64.
void divide(DType dtype, void* to, const void* from, double divisor, std::size_t count) noexcept;

// data[i] *= factor
void scale(float* data, float factor, std::size_t count) noexcept;

// sums[i] += from[i], wrapping; from any integer type.
void add_to_int64(DType dtype, std::int64_t* sums, const void* from, std::size_t count) noexcept;

// to[i] = ⌊sums[i] / divisor⌋ as `dtype`, an integer type; divisor ≥ 1.
void floor_divide(DType dtype, void* to, const std::int64_t* sums, std::int64_t divisor, std::size_t count) noexcept;

}  // namespace commlib
