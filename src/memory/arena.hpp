// SPDX-License-Identifier: Apache-2.0
// Hands out pieces of a segment. What has been freed goes back to the system, but for a little that stays resident so
// that a buffer of the same size, allocated again and again, costs no page faults.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>

#include "base/errc.hpp"
#include "memory/block_tree.hpp"
#include "memory/segment.hpp"

namespace commlib {

// All functions may be called from any thread.
class Arena {
 public:
  static constexpr std::uint64_t kNoSpace = ~std::uint64_t{0};
  static constexpr std::size_t kAlign = 64;  // of every piece
  static constexpr std::size_t kPagedBytes =
      64 * 1024;  // pieces of at least this much begin on a page and own whole pages
  static constexpr std::size_t kPunchBytes = 1024 * 1024;  // less than this, in one run, is not worth a system call
  static constexpr std::size_t kKeepBytes = 64 * 1024 * 1024;

  // Allocates from [begin, begin + bytes) of `segment`, which must outlive the arena and have nothing in that range. At
  // most `keep_bytes` of free memory in runs of at least kPunchBytes stay resident. Throws Error.
  Arena(const Segment& segment, std::size_t begin, std::size_t bytes, std::size_t keep_bytes = kKeepBytes);
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // The offset of a new piece in the segment, or kNoSpace. 0 bytes are a piece like any other. The contents are
  // undefined. Prefers low offsets, so that what is resident stays together.
  [[nodiscard]] std::uint64_t allocate(std::size_t bytes) noexcept;

  // Takes a piece back; kInternal, and nothing happens, if there is none at `offset` (a bug of the caller). May give
  // memory back to the system before it returns: for large pieces that takes about 0.1 ms a MiB, with no lock held.
  Errc free(std::uint64_t offset) noexcept;

  // In pieces, each rounded up to its alignment.
  [[nodiscard]] std::size_t allocated_bytes() const noexcept;

  // Runs of free memory: 1 when nothing is allocated (and no call of free is under way).
  [[nodiscard]] std::size_t free_runs() const noexcept;

  [[nodiscard]] std::byte* at(std::uint64_t offset) const noexcept { return segment_.data() + offset; }

 private:
  using Block = BlockTree::Block;

  void carve(BlockTree::Index from, std::uint64_t offset, std::uint64_t bytes, BlockTree::State state) noexcept;
  void release(BlockTree::Index index, bool is_resident) noexcept;
  void put_free(BlockTree::Index index, const Block& block) noexcept;
  [[nodiscard]] bool carve_victim(Block* victim) noexcept;
  [[nodiscard]] std::uint64_t counted(const Block& block) const noexcept;

  const Segment& segment_;
  const std::size_t capacity_;
  const std::size_t keep_bytes_;

  mutable std::mutex mutex_;  // guards all below; innermost, no system call is made with it held
  BlockTree blocks_;
  std::uint64_t allocated_bytes_ = 0;
  std::uint64_t kept_bytes_ = 0;  // resident, in free blocks that are worth punching
  std::size_t blocks_not_free_ = 0;
};

}  // namespace commlib
