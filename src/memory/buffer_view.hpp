// SPDX-License-Identifier: Apache-2.0
// A typed view of somebody else's memory. It never owns.
#pragma once

#include <cstddef>
#include <cstdint>

namespace commlib {

// The numbers are shared with commlib/dtypes.py and with commlib.h (a test compares them).
enum class DType : std::uint8_t {
  kBool = 0,
  kUint8 = 1,
  kInt8 = 2,
  kInt16 = 3,
  kInt32 = 4,
  kInt64 = 5,
  kFloat16 = 6,
  kBfloat16 = 7,
  kFloat32 = 8,
  kFloat64 = 9,
};
inline constexpr int kDTypeCount = 10;

enum class ReduceOp : std::uint8_t { kAverage = 0, kSum = 1, kMin = 2, kMax = 3, kProduct = 4 };
inline constexpr int kReduceOpCount = 5;

[[nodiscard]] constexpr std::size_t item_bytes(DType dtype) noexcept {
  constexpr std::size_t kBytes[kDTypeCount] = {1, 1, 1, 2, 4, 8, 2, 2, 4, 8};
  return kBytes[static_cast<int>(dtype)];
}

[[nodiscard]] constexpr bool is_integer(DType dtype) noexcept {
  return dtype >= DType::kUint8 && dtype <= DType::kInt64;
}

struct BufferView {
  std::byte* data = nullptr;
  std::size_t count = 0;  // elements
  DType dtype = DType::kFloat32;

  [[nodiscard]] std::size_t bytes() const noexcept { return count * item_bytes(dtype); }
};

}  // namespace commlib
