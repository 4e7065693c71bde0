// SPDX-License-Identifier: Apache-2.0
// The blocks of an arena, free and used, in the order of their offsets: a treap that knows for each subtree the largest
// free block. Everything is O(log n). One mutex, the arena's, guards it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace commlib {

class BlockTree {
 public:
  using Index = std::uint32_t;
  static constexpr Index kNone = 0;

  enum class State : std::uint8_t { kFree, kUsed, kPunching };

  struct Block {
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
    // Free blocks: the part that may have pages. One interval is enough: a hole inside it is only punched again.
    std::uint64_t resident_begin = 0;
    std::uint64_t resident_end = 0;
    State state = State::kFree;

    [[nodiscard]] std::uint64_t end() const noexcept { return offset + bytes; }
    [[nodiscard]] std::uint64_t resident_bytes() const noexcept { return resident_end - resident_begin; }
  };

  // What the search looks for, chosen by the arena: `paged_align` is the alignment of large blocks, and a free block
  // with at least `least_punch` resident bytes is worth punching.
  BlockTree(std::uint64_t paged_align, std::uint64_t least_punch);

  // Makes sure that the next `blocks` calls of insert need no memory. May throw std::bad_alloc.
  void reserve(std::size_t blocks);

  Index insert(const Block& block) noexcept;  // reserved before
  void erase(Index index) noexcept;
  void replace(Index index, const Block& block) noexcept;  // same offset

  [[nodiscard]] const Block& at(Index index) const noexcept { return nodes_[index].block; }
  [[nodiscard]] Index find(std::uint64_t offset) const noexcept;    // the block that begins there
  [[nodiscard]] Index before(std::uint64_t offset) const noexcept;  // the last one that begins before
  [[nodiscard]] std::size_t count() const noexcept { return count_; }

  // The free block with the lowest offset that has `bytes` (from its first multiple of paged_align on, if `is_paged`).
  [[nodiscard]] Index first_fit(std::uint64_t bytes, bool is_paged) const noexcept;

  // The free block with the highest offset that is worth punching.
  [[nodiscard]] Index last_punchable() const noexcept;

  [[nodiscard]] bool is_punchable(const Block& block) const noexcept {
    return block.state == State::kFree && block.resident_bytes() >= least_punch_;
  }
  [[nodiscard]] std::uint64_t paged_bytes(const Block& block) const noexcept;  // what is left after aligning

 private:
  struct Node {
    Block block;
    Index left = kNone;
    Index right = kNone;
    std::uint32_t priority = 0;
    // Over the free blocks of this subtree:
    bool any_punchable = false;
    std::uint64_t most_bytes = 0;
    std::uint64_t most_paged = 0;
  };

  void pull(Index index) noexcept;
  [[nodiscard]] Index insert_below(Index root, Index index) noexcept;
  [[nodiscard]] Index erase_below(Index root, Index index) noexcept;
  void refresh_below(Index root, std::uint64_t offset) noexcept;
  void split(Index root, std::uint64_t offset, Index* left, Index* right) noexcept;
  [[nodiscard]] Index merge(Index left, Index right) noexcept;

  const std::uint64_t paged_align_;
  const std::uint64_t least_punch_;
  std::vector<Node> nodes_;  // node 0 is kNone: an empty subtree
  Index root_ = kNone;
  Index spare_ = kNone;  // unused nodes, chained by `left`
  std::size_t spares_ = 0;
  std::size_t count_ = 0;
  std::uint32_t random_ = 0x9E3779B9;  // xorshift32; any start but 0
};

}  // namespace commlib
