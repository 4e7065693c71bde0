// SPDX-License-Identifier: Apache-2.0
#include "sched/partition.hpp"

#include <algorithm>
#include <string>

#include "base/errc.hpp"
#include "sched/wire.hpp"

namespace commlib {

void check_partition_bytes(std::uint64_t partition_bytes) {
  if (partition_bytes == 0 || partition_bytes % kGranuleBytes != 0) {
    throw Error(Errc::kConfig,
                "partition_bytes must be a positive multiple of 65536, not " + std::to_string(partition_bytes));
  }
}

std::uint32_t part_count(std::uint64_t total_bytes, std::uint64_t partition_bytes) {
  check_partition_bytes(partition_bytes);
  if (total_bytes == 0) return 1;
  const std::uint64_t parts = (total_bytes - 1) / partition_bytes + 1;
  if (parts > kMaxParts) {
    throw Error(Errc::kUnsupported, std::to_string(total_bytes) + " bytes are more than 65536 partitions of " +
                                        std::to_string(partition_bytes) + " bytes; choose a larger partition_bytes");
  }
  return static_cast<std::uint32_t>(parts);
}

PartRange part_range(std::uint32_t part, std::uint64_t total_count, std::size_t item_bytes,
                     std::uint64_t partition_bytes) {
  check_partition_bytes(partition_bytes);
  const std::uint64_t step = partition_bytes / item_bytes;
  const std::uint64_t first = std::min(part * step, total_count);
  return {first, std::min(step, total_count - first)};
}

std::uint64_t make_key(std::uint64_t declared_key, std::uint32_t part) {
  if (declared_key >= kMaxDeclaredKeys) {
    throw Error(Errc::kUnsupported, "declared key " + std::to_string(declared_key) + " is not below 2^47");
  }
  if (part >= kMaxParts) throw Error(Errc::kUnsupported, "partition " + std::to_string(part) + " is not below 65536");
  return declared_key << 16 | part;
}

}  // namespace commlib
