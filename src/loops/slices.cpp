// SPDX-License-Identifier: Apache-2.0
#include "loops/slices.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <vector>

#include "memory/remote.hpp"
#include "reduce/reduce.hpp"

namespace commlib {

namespace {

// Of the tensor, at a time. What has to be fetched comes in blocks that fit in the second-level cache and are worth a
// system call; what is broadcast to others stays in the first-level cache.
constexpr std::size_t kFetchBytes = 256 * 1024;  // all inputs that are fetched, together
constexpr std::size_t kLeastFetchBytes = 32 * 1024;
constexpr std::size_t kCopiedBytes = 4 * 1024;
constexpr std::size_t kBlockBytes = 64 * 1024;       // of a partial
constexpr std::size_t kWholeSliceBytes = 64 * 1024;  // below, one rank does all: cheaper than waking another

struct Range {
  std::uint64_t begin;  // elements of the partition
  std::uint64_t end;
};

Range range_of(const PartTask& task, std::uint32_t slice) noexcept {
  const std::uint64_t unit = 64 / item_bytes(task.operation->dtype);  // slices meet at cache lines
  const std::uint64_t units = (task.count + unit - 1) / unit;
  const auto bound = [&](std::uint64_t s) { return std::min(units * s / task.slice_count * unit, task.count); };
  return {bound(slice), slice + 1 == task.slice_count ? task.count : bound(slice + 1)};
}

// Memory for an input that has to be fetched through the kernel; one set a thread, kept for the next slice.
std::byte* scratch(std::size_t index) noexcept {
  thread_local std::vector<std::unique_ptr<std::byte[]>> blocks;
  while (blocks.size() <= index) blocks.push_back(std::make_unique_for_overwrite<std::byte[]>(kFetchBytes));
  return blocks[index].get();
}

// Address in this process of a place of rank `rank`, or nullptr if it must be fetched through the kernel.
std::byte* address_of(const LocalContext& context, std::uint32_t rank, Place place) noexcept {
  if (!place.is_address()) return context.arena_bases[place.arena()] + place.offset();
  return rank == context.local_rank ? reinterpret_cast<std::byte*>(place.offset()) : nullptr;
}

// The memory that a rank has given is not there, though the rank is: the job is over, and by its fault.
void blame_unreadable(const LocalContext& context, std::uint32_t rank) noexcept {
  if (!context.table.has_left(rank)) context.table.abort(context.global_ranks[rank], Cause::kUnreadable);
}

// Does this slice lie in our own memory alone?
bool is_kept(const LocalContext& context, const PartTask& task, std::uint32_t slice) noexcept {
  return task.keeps_own_slice && slice == context.local_rank;
}

// What is before the own slice, or in any case all, and what is behind it: where it was kept.
template <typename Copy>
void for_all_but_own(const LocalContext& context, const PartTask& task, Copy copy) noexcept {
  const std::size_t item = item_bytes(task.operation->dtype);
  const Range own = task.keeps_own_slice ? range_of(task, context.local_rank) : Range{task.count, task.count};
  copy(0, own.begin * item);
  copy(own.end * item, (task.count - own.end) * item);
}

// Those who put something in, in local rank order.
class Sources {
 public:
  Sources(const LocalContext& context, const PartTask& task, std::uint32_t slice) noexcept
      : context_(context), item_(item_bytes(task.operation->dtype)) {
    const bool is_broadcast = task.operation->collective == Collective::kBroadcast;
    const auto root = static_cast<std::uint32_t>(context.local_root_of(*task.operation));
    for (std::uint32_t rank = is_broadcast ? root : 0; rank < (is_broadcast ? root + 1 : context.local_size); ++rank) {
      const Place place = Place::from_bits(task.row.entry(rank).input.load(std::memory_order_relaxed));
      const bool is_own = rank == context.local_rank && is_kept(context, task, slice);
      bases_[count_] = is_own ? const_cast<std::byte*>(task.input()) : address_of(context, rank, place);
      addresses_[count_] = place.offset();
      ranks_[count_++] = rank;
    }
  }

  // Pointers to elements [begin, begin + count) of all sources, fetched if need be.
  [[nodiscard]] Errc block(std::uint64_t begin, std::uint64_t count, const void** pointers) const noexcept {
    for (std::size_t i = 0; i < count_; ++i) {
      if (bases_[i] != nullptr) {
        pointers[i] = bases_[i] + begin * item_;
        continue;
      }
      std::byte* block = scratch(i);
      const Errc code = remote_read(context_.pids[ranks_[i]], block, addresses_[i] + begin * item_, count * item_);
      if (code == Errc::kInternal) blame_unreadable(context_, ranks_[i]);
      if (code != Errc::kOk) return code;
      pointers[i] = block;
    }
    return Errc::kOk;
  }
  [[nodiscard]] std::size_t count() const noexcept { return count_; }
  [[nodiscard]] std::size_t fetched() const noexcept {
    return static_cast<std::size_t>(std::count(bases_.begin(), bases_.begin() + count_, nullptr));
  }

 private:
  const LocalContext& context_;
  std::size_t item_;
  std::size_t count_ = 0;
  std::array<std::byte*, kMaxLocalRanks> bases_;
  std::array<std::uint64_t, kMaxLocalRanks> addresses_;
  std::array<std::uint32_t, kMaxLocalRanks> ranks_;
};

}  // namespace

std::uint32_t slice_count_of(std::size_t bytes, std::uint32_t local_size) noexcept {
  return bytes < kWholeSliceBytes ? 1 : local_size;
}

Errc sum_slice(const LocalContext& context, const PartTask& task, std::uint32_t slice) noexcept {
  const Operation& operation = *task.operation;
  const std::size_t item = item_bytes(operation.dtype);
  const Sources sources(context, task, slice);
  std::array<std::byte*, kMaxLocalRanks> others;  // where else the result is written to
  std::size_t other_count = 0;
  std::byte* mine = nullptr;
  for (std::uint32_t rank = 0; rank < context.local_size; ++rank) {
    const Place place = Place::from_bits(task.row.entry(rank).output.load(std::memory_order_relaxed));
    std::byte* const output = address_of(context, rank, place);
    if (rank == context.local_rank) {
      mine = output;
    } else if (output != nullptr) {
      others[other_count++] = output;
    }
  }
  if (is_kept(context, task, slice)) {
    // Some cannot be written to: they will look for it where the rest of our result is.
    if (other_count + 1 < context.local_size) others[other_count++] = mine;
    mine = task.output();
  }
  const Range range = range_of(task, slice);
  const std::size_t fetched = sources.fetched();
  const bool is_broadcast = operation.collective == Collective::kBroadcast;
  const std::size_t block_bytes = fetched != 0   ? std::max(kFetchBytes / fetched, kLeastFetchBytes)
                                  : is_broadcast ? kCopiedBytes
                                                 : kFetchBytes;
  const std::uint64_t block = block_bytes / item;
  std::array<const void*, kMaxLocalRanks> pointers;
  std::array<void*, kMaxLocalRanks> places;
  for (std::uint64_t begin = range.begin; begin < range.end; begin += block) {
    if (context.table.aborted()) return Errc::kPeerLost;
    const std::uint64_t count = std::min(block, range.end - begin);
    const Errc code = sources.block(begin, count, pointers.data());
    if (code != Errc::kOk) return code;
    void* const to = mine + begin * item;
    for (std::size_t i = 0; i < other_count; ++i) places[i] = others[i] + begin * item;
    if (!is_broadcast) {
      const Outputs outputs(to, places.data(), other_count);
      reduce_local(operation.dtype, operation.op, outputs, pointers.data(), sources.count(), count);
      continue;
    }
    if (to != pointers[0]) std::memcpy(to, pointers[0], count * item);
    for (std::size_t i = 0; i < other_count; ++i) {
      if (places[i] != pointers[0]) std::memcpy(places[i], to, count * item);
    }
  }
  return Errc::kOk;
}

Errc reduce_slice(const LocalContext& context, const PartTask& task, std::uint32_t slice) noexcept {
  const Operation& operation = *task.operation;
  const std::size_t item = item_bytes(operation.dtype);
  const std::size_t wire_item = item_bytes(wire_dtype(operation.dtype, operation.op));
  const Sources sources(context, task, slice);
  const Place place = Place::from_bits(task.row.head().partial.load(std::memory_order_acquire));
  std::byte* const partial = context.arena_bases[place.arena()] + place.offset();
  const Range range = range_of(task, slice);
  std::array<const void*, kMaxLocalRanks> pointers;
  for (std::uint64_t begin = range.begin; begin < range.end; begin += kBlockBytes / item) {
    if (context.table.aborted()) return Errc::kPeerLost;
    const std::uint64_t count = std::min<std::uint64_t>(kBlockBytes / item, range.end - begin);
    const Errc code = sources.block(begin, count, pointers.data());
    if (code != Errc::kOk) return code;
    if (operation.collective == Collective::kBroadcast) {
      std::memcpy(partial + begin * item, pointers[0], count * item);
    } else {
      reduce_host(operation.dtype, operation.op, partial + begin * wire_item, pointers.data(), sources.count(), count);
    }
  }
  return Errc::kOk;
}

CopyHead* copy_of(const LocalContext& context, const PartTask& task, std::uint32_t rank) noexcept {
  return context.table.copy(task.row_index, rank, task.operation->round);
}

void sum_copies(const LocalContext& context, const PartTask& task) noexcept {
  const Operation& operation = *task.operation;
  if (task.bytes() == 0 || context.has_it(operation)) return;
  if (operation.collective == Collective::kBroadcast) {
    const auto root = static_cast<std::uint32_t>(context.local_root_of(operation));
    std::memcpy(task.output(), copy_of(context, task, root) + 1, task.bytes());
    return;
  }
  std::array<const void*, kMaxLocalRanks> pointers;
  for (std::uint32_t rank = 0; rank < context.local_size; ++rank) pointers[rank] = copy_of(context, task, rank) + 1;
  reduce_local(operation.dtype, operation.op, task.output(), pointers.data(), context.local_size, task.count);
}

void stage_all_but_own(const LocalContext& context, const PartTask& task) noexcept {
  const Operation& operation = *task.operation;
  // Who is sent something has nothing to put in.
  if (operation.collective == Collective::kBroadcast && operation.root != context.global_ranks[context.local_rank])
    return;
  for_all_but_own(context, task, [&](std::size_t at, std::size_t bytes) {
    std::memcpy(context.arena.at(task.staging) + at, task.input() + at, bytes);
  });
}

void unstage_all_but_own(const LocalContext& context, const PartTask& task) noexcept {
  if (context.has_it(*task.operation)) return;
  for_all_but_own(context, task, [&](std::size_t at, std::size_t bytes) {
    std::memcpy(task.output() + at, context.arena.at(task.staging) + at, bytes);
  });
}

Errc collect_slice(const LocalContext& context, const PartTask& task, std::uint32_t slice) noexcept {
  const std::uint32_t rank = task.row.executor(slice);
  const Place place = Place::from_bits(task.row.entry(rank).output.load(std::memory_order_relaxed));
  const std::size_t item = item_bytes(task.operation->dtype);
  const Range range = range_of(task, slice);
  const std::size_t offset = range.begin * item;
  const std::size_t bytes = (range.end - range.begin) * item;
  if (bytes == 0) return Errc::kOk;
  if (const std::byte* from = address_of(context, rank, place); from != nullptr) {
    std::memcpy(task.output() + offset, from + offset, bytes);
    return Errc::kOk;
  }
  std::byte* const to = task.output() + offset;
  const Errc code = remote_read(context.pids[rank], to, place.offset() + offset, bytes);
  if (code == Errc::kInternal) {
    // Either of the two may be what is not there.
    const int self = context.pids[context.local_rank];
    const std::size_t some = std::min(bytes, kBlockBytes);
    const bool is_mine = remote_read(self, scratch(0), reinterpret_cast<std::uint64_t>(to), some) != Errc::kOk;
    blame_unreadable(context, is_mine ? context.local_rank : rank);
  }
  return code;
}

}  // namespace commlib
