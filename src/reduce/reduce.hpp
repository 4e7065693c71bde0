// SPDX-License-Identifier: Apache-2.0
// Sums (and Min, Max, Product, Average) of n buffers in one pass. Pure functions: no state, any thread, never blocking.
//
// The bits of a result depend on the inputs and on their order alone. Sources are combined as ((s0 ∘ s1) ∘ s2) …;
// 16-bit floats in a float32 accumulator, rounded once at the end of a call (round to nearest even); bool inputs
// count as true when not zero and come out as 0 or 1. Integer Sum and Product wrap. Min and Max propagate NaN.
// Integer Average accumulates in int64 (wrapping) and floors (towards minus infinity), as NumPy's `//` does.
// Float Average is a true division of the accumulator (float32 for 16-bit types) by the number of ranks.
//
// A reduction over hosts has two levels. Level one, on each host (`reduce_host`), turns the inputs of its ranks into one
// partial of `wire_dtype`. Level two, at the owner (`reduce_owner`), turns the partials, in node order, into the result.
// A host alone needs one call, `reduce_local`.
#pragma once

#include <cstddef>
#include <cstdint>

#include "memory/buffer_view.hpp"
#include "reduce/loose.hpp"

namespace commlib {

// What a partial is made of: int64 for the Average of integers, else the dtype itself.
[[nodiscard]] constexpr DType wire_dtype(DType dtype, ReduceOp op) noexcept {
  return op == ReduceOp::kAverage && is_integer(dtype) ? DType::kInt64 : dtype;
}

// False for the Average of bool; true for all else.
[[nodiscard]] constexpr bool is_supported(DType dtype, ReduceOp op) noexcept {
  return !(dtype == DType::kBool && op == ReduceOp::kAverage);
}

// For all three: `sources` are `n` ≥ 1 pointers to `count` elements each, at any alignment. `destination` may be the very
// same address as one of the sources, else it overlaps none; so may each place of `to`, all of them apart. count may be 0.

// result[i] = op over sources, Average divided by n, to one place or several. Elements and result are of `dtype`.
void reduce_local(DType dtype, ReduceOp op, Outputs to, const void* const* sources, std::size_t n,
                  std::size_t count) noexcept;

// partial[i]: as reduce_local, but a float32/float64 Average stays a sum, an integer Average an int64 sum (destination of
// wire_dtype, overlapping no source if that is wider), and a 16-bit float Average becomes this host's mean, in 16 bits.
void reduce_host(DType dtype, ReduceOp op, void* destination, const void* const* sources, std::size_t n,
                 std::size_t count) noexcept;

// Sources are partials (wire_dtype) of `n` hosts with `ranks[h]` ranks each; result of `dtype`. Average divides by the sum
// of `ranks`; 16-bit float means are weighted by their `ranks` first. `destination` may be the address of a source even
// where the result is narrower than the partials.
void reduce_owner(DType dtype, ReduceOp op, void* destination, const void* const* sources, const std::uint32_t* ranks,
                  std::size_t n, std::size_t count) noexcept;

}  // namespace commlib
