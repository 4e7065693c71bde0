// SPDX-License-Identifier: Apache-2.0
// How a tensor is divided into partitions, the units of scheduling, and how their keys are made.
#pragma once

#include <cstddef>
#include <cstdint>

namespace commlib {

inline constexpr std::uint32_t kMaxParts = 1U << 16;
inline constexpr std::uint64_t kMaxDeclaredKeys = std::uint64_t{1} << 47;

struct PartRange {
  std::uint64_t first = 0;  // element within the tensor
  std::uint64_t count = 0;  // elements

  friend bool operator==(const PartRange&, const PartRange&) = default;
};

// `partition_bytes` must be a positive multiple of 64 KiB: Error(kConfig) otherwise.
void check_partition_bytes(std::uint64_t partition_bytes);

// Partitions of a tensor, at least 1. Throws Error(kConfig) for a bad partition_bytes, Error(kUnsupported) for more
// than kMaxParts.
[[nodiscard]] std::uint32_t part_count(std::uint64_t total_bytes, std::uint64_t partition_bytes);

// The elements of partition `part` < part_count(…) of a tensor of `total_count` elements of `item_bytes` (1, 2, 4 or
// 8).
[[nodiscard]] PartRange part_range(std::uint32_t part, std::uint64_t total_count, std::size_t item_bytes,
                                   std::uint64_t partition_bytes);

// declared_key << 16 | part; throws Error(kUnsupported) where one of them is too large.
[[nodiscard]] std::uint64_t make_key(std::uint64_t declared_key, std::uint32_t part);
[[nodiscard]] constexpr std::uint64_t declared_key_of(std::uint64_t key) noexcept { return key >> 16; }
[[nodiscard]] constexpr std::uint32_t part_of(std::uint64_t key) noexcept {
  return static_cast<std::uint32_t>(key & 0xFFFF);
}

}  // namespace commlib
