// SPDX-License-Identifier: Apache-2.0
#include "memory/block_tree.hpp"

#include <algorithm>

namespace commlib {

BlockTree::BlockTree(std::uint64_t paged_align, std::uint64_t least_punch)
    : paged_align_(paged_align), least_punch_(least_punch), nodes_(1) {
  nodes_[kNone].block.state = State::kUsed;  // never found
}

void BlockTree::reserve(std::size_t blocks) {
  while (spares_ < blocks) {
    nodes_.emplace_back();
    nodes_.back().left = spare_;
    spare_ = static_cast<Index>(nodes_.size() - 1);
    ++spares_;
  }
}

BlockTree::Index BlockTree::insert(const Block& block) noexcept {
  const Index index = spare_;
  Node& node = nodes_[index];
  spare_ = node.left;
  --spares_;
  random_ ^= random_ << 13;
  random_ ^= random_ >> 17;
  random_ ^= random_ << 5;
  node = Node{};
  node.block = block;
  node.priority = random_;
  root_ = insert_below(root_, index);
  ++count_;
  return index;
}

void BlockTree::erase(Index index) noexcept {
  root_ = erase_below(root_, index);
  nodes_[index].left = spare_;
  spare_ = index;
  ++spares_;
  --count_;
}

void BlockTree::replace(Index index, const Block& block) noexcept {
  nodes_[index].block = block;
  refresh_below(root_, block.offset);
}

BlockTree::Index BlockTree::find(std::uint64_t offset) const noexcept {
  Index at = root_;
  while (at != kNone && nodes_[at].block.offset != offset) {
    at = offset < nodes_[at].block.offset ? nodes_[at].left : nodes_[at].right;
  }
  return at;
}

BlockTree::Index BlockTree::before(std::uint64_t offset) const noexcept {
  Index best = kNone;
  for (Index at = root_; at != kNone;) {
    const bool is_before = nodes_[at].block.offset < offset;
    if (is_before) best = at;
    at = is_before ? nodes_[at].right : nodes_[at].left;
  }
  return best;
}

BlockTree::Index BlockTree::first_fit(std::uint64_t bytes, bool is_paged) const noexcept {
  const auto most = [&](Index at) { return is_paged ? nodes_[at].most_paged : nodes_[at].most_bytes; };
  Index at = root_;
  if (most(at) < bytes) return kNone;
  for (;;) {  // `at` has what we want in its subtree
    const Node& node = nodes_[at];
    if (most(node.left) >= bytes) {
      at = node.left;
    } else if (node.block.state == State::kFree && (is_paged ? paged_bytes(node.block) : node.block.bytes) >= bytes) {
      return at;
    } else {
      at = node.right;
    }
  }
}

BlockTree::Index BlockTree::last_punchable() const noexcept {
  Index at = root_;
  if (!nodes_[at].any_punchable) return kNone;
  for (;;) {
    const Node& node = nodes_[at];
    if (nodes_[node.right].any_punchable) {
      at = node.right;
    } else if (is_punchable(node.block)) {
      return at;
    } else {
      at = node.left;
    }
  }
}

std::uint64_t BlockTree::paged_bytes(const Block& block) const noexcept {
  const std::uint64_t begin = (block.offset + paged_align_ - 1) / paged_align_ * paged_align_;
  return begin < block.end() ? block.end() - begin : 0;
}

void BlockTree::pull(Index index) noexcept {
  Node& node = nodes_[index];
  const Node& left = nodes_[node.left];
  const Node& right = nodes_[node.right];
  node.most_bytes = std::max(left.most_bytes, right.most_bytes);
  node.most_paged = std::max(left.most_paged, right.most_paged);
  node.any_punchable = left.any_punchable || right.any_punchable || is_punchable(node.block);
  if (node.block.state != State::kFree) return;
  node.most_bytes = std::max(node.most_bytes, node.block.bytes);
  node.most_paged = std::max(node.most_paged, paged_bytes(node.block));
}

BlockTree::Index BlockTree::insert_below(Index root, Index index) noexcept {
  Node& node = nodes_[index];
  if (root == kNone || node.priority > nodes_[root].priority) {
    split(root, node.block.offset, &node.left, &node.right);
    pull(index);
    return index;
  }
  Node& top = nodes_[root];
  Index& side = node.block.offset < top.block.offset ? top.left : top.right;
  side = insert_below(side, index);
  pull(root);
  return root;
}

BlockTree::Index BlockTree::erase_below(Index root, Index index) noexcept {
  Node& top = nodes_[root];
  if (root == index) return merge(top.left, top.right);
  Index& side = nodes_[index].block.offset < top.block.offset ? top.left : top.right;
  side = erase_below(side, index);
  pull(root);
  return root;
}

void BlockTree::refresh_below(Index root, std::uint64_t offset) noexcept {
  const Node& top = nodes_[root];
  if (offset != top.block.offset) refresh_below(offset < top.block.offset ? top.left : top.right, offset);
  pull(root);
}

// Blocks before `offset` to the left, the others to the right.
void BlockTree::split(Index root, std::uint64_t offset, Index* left, Index* right) noexcept {
  if (root == kNone) {
    *left = kNone;
    *right = kNone;
    return;
  }
  Node& top = nodes_[root];
  if (top.block.offset < offset) {
    *left = root;
    split(top.right, offset, &top.right, right);
  } else {
    *right = root;
    split(top.left, offset, left, &top.left);
  }
  pull(root);
}

BlockTree::Index BlockTree::merge(Index left, Index right) noexcept {
  if (left == kNone) return right;
  if (right == kNone) return left;
  if (nodes_[left].priority > nodes_[right].priority) {
    nodes_[left].right = merge(nodes_[left].right, right);
    pull(left);
    return left;
  }
  nodes_[right].left = merge(left, nodes_[right].left);
  pull(right);
  return right;
}

}  // namespace commlib
