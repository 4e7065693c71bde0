// SPDX-License-Identifier: Apache-2.0
//
// Design notes. For each operation there is one template (ops.hpp), always inlined, and for each dtype a thin function
// that holds the loops of all operations and is cloned for several instruction sets (base/simd.hpp).
#include "reduce/kernels.hpp"

#include <bit>

#include "base/simd.hpp"
#include "reduce/half.hpp"
#include "reduce/loose.hpp"
#include "reduce/ops.hpp"

namespace commlib {

namespace {

template <class T>
[[gnu::always_inline]] inline void divide_as(void* to, const void* from, double divisor, std::size_t count) noexcept {
  auto* const out = loose<T>(to);
  const auto* const in = loose<T>(from);
  const T by = static_cast<T>(divisor);
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) out[i].value = in[i].value / by;
}

template <class T>
[[gnu::always_inline]] inline void add_as(std::int64_t* sums, const void* from, std::size_t count) noexcept {
  const auto* const in = loose<T>(from);
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) sums[i] = Sum::of(sums[i], static_cast<std::int64_t>(in[i].value));
}

template <class T>
[[gnu::always_inline]] inline void floor_divide_as(void* to, const std::int64_t* sums, std::int64_t divisor,
                                                   std::size_t count) noexcept {
  auto* const out = loose<T>(to);
  const auto by = static_cast<std::uint64_t>(divisor);
  if (std::has_single_bit(by)) {  // so common, and so much faster
    const int shift = std::countr_zero(by);
#pragma GCC ivdep
    for (std::size_t i = 0; i < count; ++i) out[i].value = static_cast<T>(sums[i] >> shift);
    return;
  }
  for (std::size_t i = 0; i < count; ++i) {
    const std::int64_t toward_zero = sums[i] / divisor;
    const bool is_below = sums[i] % divisor < 0;
    out[i].value = static_cast<T>(toward_zero - (is_below ? 1 : 0));
  }
}

}  // namespace

COMMLIB_CLONES void combine_bool(ReduceOp op, double divisor, Outputs to, Inputs in, std::size_t count) noexcept {
  combine_as<Bool>(op, divisor, to, in, 0, count);
}
COMMLIB_CLONES void combine_uint8(ReduceOp op, double divisor, Outputs to, Inputs in, std::size_t count) noexcept {
  combine_as<std::uint8_t>(op, divisor, to, in, 0, count);
}
COMMLIB_CLONES void combine_int8(ReduceOp op, double divisor, Outputs to, Inputs in, std::size_t count) noexcept {
  combine_as<std::int8_t>(op, divisor, to, in, 0, count);
}
COMMLIB_CLONES void combine_int16(ReduceOp op, double divisor, Outputs to, Inputs in, std::size_t count) noexcept {
  combine_as<std::int16_t>(op, divisor, to, in, 0, count);
}
COMMLIB_CLONES void combine_int32(ReduceOp op, double divisor, Outputs to, Inputs in, std::size_t count) noexcept {
  combine_as<std::int32_t>(op, divisor, to, in, 0, count);
}
COMMLIB_CLONES void combine_int64(ReduceOp op, double divisor, Outputs to, Inputs in, std::size_t count) noexcept {
  combine_as<std::int64_t>(op, divisor, to, in, 0, count);
}
COMMLIB_CLONES void combine_float32(ReduceOp op, double divisor, Outputs to, Inputs in, std::size_t count) noexcept {
  combine_as<float>(op, divisor, to, in, 0, count);
}
COMMLIB_CLONES void combine_float64(ReduceOp op, double divisor, Outputs to, Inputs in, std::size_t count) noexcept {
  combine_as<double>(op, divisor, to, in, 0, count);
}

void combine(DType dtype, ReduceOp op, double divisor, Outputs to, Inputs in, std::size_t count) noexcept {
  switch (dtype) {
    case DType::kBool:
      return combine_bool(op, divisor, to, in, count);
    case DType::kUint8:
      return combine_uint8(op, divisor, to, in, count);
    case DType::kInt8:
      return combine_int8(op, divisor, to, in, count);
    case DType::kInt16:
      return combine_int16(op, divisor, to, in, count);
    case DType::kInt32:
      return combine_int32(op, divisor, to, in, count);
    case DType::kInt64:
      return combine_int64(op, divisor, to, in, count);
    case DType::kFloat32:
      return combine_float32(op, divisor, to, in, count);
    case DType::kFloat64:
      return combine_float64(op, divisor, to, in, count);
    case DType::kFloat16:
    case DType::kBfloat16:
      return combine_half(dtype, op, divisor, to, in, count);
  }
}

COMMLIB_CLONES void normalise_bools(void* to, const void* from, std::size_t count) noexcept {
  const void* const twice[] = {from, from};
  CombineLoop::run<Bool>(Sum{}, Sum{}, to, Inputs{twice, 2}, 0, count);
}

COMMLIB_CLONES void divide_float32(void* to, const void* from, double divisor, std::size_t count) noexcept {
  divide_as<float>(to, from, divisor, count);
}
COMMLIB_CLONES void divide_float64(void* to, const void* from, double divisor, std::size_t count) noexcept {
  divide_as<double>(to, from, divisor, count);
}

void divide(DType dtype, void* to, const void* from, double divisor, std::size_t count) noexcept {
  if (dtype == DType::kFloat32) return divide_float32(to, from, divisor, count);
  divide_float64(to, from, divisor, count);
}

COMMLIB_CLONES void scale(float* data, float factor, std::size_t count) noexcept {
  for (std::size_t i = 0; i < count; ++i) data[i] *= factor;
}

COMMLIB_CLONES void add_uint8(std::int64_t* sums, const void* from, std::size_t count) noexcept {
  add_as<std::uint8_t>(sums, from, count);
}
COMMLIB_CLONES void add_int8(std::int64_t* sums, const void* from, std::size_t count) noexcept {
  add_as<std::int8_t>(sums, from, count);
}
COMMLIB_CLONES void add_int16(std::int64_t* sums, const void* from, std::size_t count) noexcept {
  add_as<std::int16_t>(sums, from, count);
}
COMMLIB_CLONES void add_int32(std::int64_t* sums, const void* from, std::size_t count) noexcept {
  add_as<std::int32_t>(sums, from, count);
}
COMMLIB_CLONES void add_int64(std::int64_t* sums, const void* from, std::size_t count) noexcept {
  add_as<std::int64_t>(sums, from, count);
}

void add_to_int64(DType dtype, std::int64_t* sums, const void* from, std::size_t count) noexcept {
  switch (item_bytes(dtype)) {
    case 1:
      return dtype == DType::kUint8 ? add_uint8(sums, from, count) : add_int8(sums, from, count);
    case 2:
      return add_int16(sums, from, count);
    case 4:
      return add_int32(sums, from, count);
    default:
      return add_int64(sums, from, count);
  }
}

COMMLIB_CLONES void floor_divide_8(void* to, const std::int64_t* sums, std::int64_t divisor,
                                   std::size_t count) noexcept {
  floor_divide_as<std::uint8_t>(to, sums, divisor, count);
}
COMMLIB_CLONES void floor_divide_16(void* to, const std::int64_t* sums, std::int64_t divisor,
                                    std::size_t count) noexcept {
  floor_divide_as<std::uint16_t>(to, sums, divisor, count);
}
COMMLIB_CLONES void floor_divide_32(void* to, const std::int64_t* sums, std::int64_t divisor,
                                    std::size_t count) noexcept {
  floor_divide_as<std::uint32_t>(to, sums, divisor, count);
}
COMMLIB_CLONES void floor_divide_64(void* to, const std::int64_t* sums, std::int64_t divisor,
                                    std::size_t count) noexcept {
  floor_divide_as<std::uint64_t>(to, sums, divisor, count);
}

// Only the width matters: the low bits are the same for signed and unsigned results.
void floor_divide(DType dtype, void* to, const std::int64_t* sums, std::int64_t divisor, std::size_t count) noexcept {
  switch (item_bytes(dtype)) {
    case 1:
      return floor_divide_8(to, sums, divisor, count);
    case 2:
      return floor_divide_16(to, sums, divisor, count);
    case 4:
      return floor_divide_32(to, sums, divisor, count);
    default:
      return floor_divide_64(to, sums, divisor, count);
  }
}

}  // namespace commlib
