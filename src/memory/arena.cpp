// SPDX-License-Identifier: Apache-2.0
//
// Design notes. The blocks cover the range without gaps, and no two neighbours are both free. A free block knows which
// part of it may have pages (BlockTree::Block). When more than `keep_bytes` of such memory lies about in runs that are
// worth a system call, the highest of it is punched: the lowest is what the next allocation will get.
//
// A range that is being punched is not free meanwhile, so that nobody is given memory that is about to vanish, and the
// lock need not be held during the system call.
#include "memory/arena.hpp"

#include <algorithm>
#include <exception>

namespace commlib {

namespace {

std::uint64_t round_down(std::uint64_t bytes, std::uint64_t unit) noexcept { return bytes / unit * unit; }

std::uint64_t round_up(std::uint64_t bytes, std::uint64_t unit) noexcept { return round_down(bytes + unit - 1, unit); }

}  // namespace

Arena::Arena(const Segment& segment, std::size_t begin, std::size_t bytes, std::size_t keep_bytes)
    : segment_(segment), capacity_(bytes), keep_bytes_(keep_bytes), blocks_(page_bytes(), kPunchBytes) {
  COMMLIB_CHECK(begin % kAlign == 0 && bytes > 0 && begin <= segment.bytes() && bytes <= segment.bytes() - begin);
  blocks_.reserve(1);
  Block all;
  all.offset = begin;
  all.bytes = bytes;
  all.resident_begin = all.resident_end = begin;
  blocks_.insert(all);
}

std::uint64_t Arena::allocate(std::size_t bytes) noexcept {
  if (bytes > capacity_) return kNoSpace;  // also keeps the rounding from overflowing
  const bool is_paged = bytes >= kPagedBytes;
  const std::uint64_t rounded = round_up(std::max<std::uint64_t>(bytes, 1), is_paged ? page_bytes() : kAlign);
  const std::lock_guard lock(mutex_);
  try {
    blocks_.reserve(2);  // what carve needs
  } catch (const std::exception&) {
    return kNoSpace;
  }
  const auto from = blocks_.first_fit(rounded, is_paged);
  if (from == BlockTree::kNone) return kNoSpace;
  const std::uint64_t begin = blocks_.at(from).offset;
  const std::uint64_t offset = is_paged ? round_up(begin, page_bytes()) : begin;
  carve(from, offset, rounded, BlockTree::State::kUsed);
  return offset;
}

Errc Arena::free(std::uint64_t offset) noexcept {
  std::unique_lock lock(mutex_);
  const auto index = blocks_.find(offset);
  if (index == BlockTree::kNone || blocks_.at(index).state != BlockTree::State::kUsed) return Errc::kInternal;
  release(index, true);
  for (Block victim; carve_victim(&victim);) {
    lock.unlock();
    // If the system refuses, the pages stay, uncounted, until they are used and freed again.
    segment_.punch(victim.offset, victim.bytes);
    lock.lock();
    release(blocks_.find(victim.offset), false);
  }
  return Errc::kOk;
}

std::size_t Arena::allocated_bytes() const noexcept {
  const std::lock_guard lock(mutex_);
  return allocated_bytes_;
}

std::size_t Arena::free_runs() const noexcept {
  const std::lock_guard lock(mutex_);
  return blocks_.count() - blocks_not_free_;
}

std::uint64_t Arena::counted(const Block& block) const noexcept {
  return blocks_.is_punchable(block) ? block.resident_bytes() : 0;
}

// Turns [offset, offset + bytes) of a free block into one of `state`; what is left before and behind it stays free.
void Arena::carve(BlockTree::Index from, std::uint64_t offset, std::uint64_t bytes, BlockTree::State state) noexcept {
  const Block whole = blocks_.at(from);
  kept_bytes_ -= counted(whole);
  const auto part = [&whole](std::uint64_t begin, std::uint64_t end) {
    Block block;
    block.offset = begin;
    block.bytes = end - begin;
    block.resident_begin = std::clamp(whole.resident_begin, begin, end);
    block.resident_end = std::clamp(whole.resident_end, begin, end);
    return block;
  };
  Block taken = part(offset, offset + bytes);
  taken.state = state;
  if (offset > whole.offset) {
    put_free(from, part(whole.offset, offset));
    blocks_.insert(taken);
  } else {
    blocks_.replace(from, taken);
  }
  if (taken.end() < whole.end()) put_free(BlockTree::kNone, part(taken.end(), whole.end()));
  if (state == BlockTree::State::kUsed) allocated_bytes_ += bytes;
  ++blocks_not_free_;
}

// Makes a block free and one with its free neighbours. Needs no memory, so it cannot fail.
void Arena::release(BlockTree::Index index, bool is_resident) noexcept {
  Block block = blocks_.at(index);
  if (block.state == BlockTree::State::kUsed) allocated_bytes_ -= block.bytes;
  --blocks_not_free_;
  block.state = BlockTree::State::kFree;
  block.resident_begin = block.offset;
  block.resident_end = is_resident ? block.end() : block.offset;
  const auto join = [this, &block](BlockTree::Index neighbour) {
    const Block& other = blocks_.at(neighbour);
    kept_bytes_ -= counted(other);
    if (block.resident_bytes() == 0) {
      block.resident_begin = other.resident_begin;
      block.resident_end = other.resident_end;
    } else if (other.resident_bytes() != 0) {
      block.resident_begin = std::min(block.resident_begin, other.resident_begin);
      block.resident_end = std::max(block.resident_end, other.resident_end);
    }
    block.offset = std::min(block.offset, other.offset);
    block.bytes += other.bytes;
  };
  const auto next = blocks_.find(block.end());
  if (next != BlockTree::kNone && blocks_.at(next).state == BlockTree::State::kFree) {
    join(next);
    blocks_.erase(next);
  }
  const auto previous = blocks_.before(block.offset);
  if (previous != BlockTree::kNone && blocks_.at(previous).state == BlockTree::State::kFree) {
    join(previous);
    blocks_.erase(index);
    index = previous;
  }
  if (block.resident_bytes() == 0) block.resident_begin = block.resident_end = block.offset;
  put_free(index, block);
}

// Stores a free block, in place of the one at `index` if there is one.
void Arena::put_free(BlockTree::Index index, const Block& block) noexcept {
  kept_bytes_ += counted(block);
  if (index == BlockTree::kNone) {
    blocks_.insert(block);
  } else {
    blocks_.replace(index, block);
  }
}

// Cuts off the highest of the resident free memory that is too much, for punching.
bool Arena::carve_victim(Block* victim) noexcept {
  if (kept_bytes_ <= keep_bytes_) return false;
  try {
    blocks_.reserve(2);
  } catch (const std::exception&) {
    return false;  // the next free tries again
  }
  const auto index = blocks_.last_punchable();
  const Block& whole = blocks_.at(index);
  // At least a run that is worth it, and no rest that is not. Whole pages, wherever the neighbours leave us one.
  const std::uint64_t resident = whole.resident_bytes();
  const std::uint64_t excess = std::max<std::uint64_t>(kept_bytes_ - keep_bytes_, kPunchBytes);
  const std::uint64_t wanted = resident < excess + kPunchBytes ? resident : excess;
  const std::uint64_t begin = std::max(round_down(whole.resident_end - wanted, page_bytes()), whole.offset);
  const std::uint64_t end = std::min(round_up(whole.resident_end, page_bytes()), whole.end());
  carve(index, begin, end - begin, BlockTree::State::kPunching);
  victim->offset = begin;
  victim->bytes = end - begin;
  return true;
}

}  // namespace commlib
