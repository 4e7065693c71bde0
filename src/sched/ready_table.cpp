// SPDX-License-Identifier: Apache-2.0
//
// Design notes
//
// Every word carries a round, so nothing is ever reset: memory starts as zeros, rounds start at 1, and a word that holds
// an older round simply does not speak of this one.
//
// A round is done at a rank only after every rank has arrived in it and every slice is done. Therefore an entry whose round
// is larger than mine says that mine is over: done, or failed (ranks that disagree about the number of partitions may even
// never have met in this row). The round word is written before and after the other fields of an entry, as in a seqlock, so
// that nobody takes a signature of the next round for one of this.
//
// Two patterns need sequential consistency, both of the kind "I write mine, then read yours":
//   arrival   each rank stores its round, then reads all others: at least one of two that arrive at once must see both;
//   slices    each finisher stores done, then reads all others: at least one must see all of them.
// The stores and the loads of these are sequentially consistent (fences would do as well, but ThreadSanitizer does not know
// them). Everything else is release on the word that publishes and acquire on the word that looks.
#include "sched/ready_table.hpp"

#include <new>

namespace commlib {

namespace {

constexpr std::size_t kPage = 4096;
constexpr std::uint64_t kEpochBit = std::uint64_t{1} << 63;

constexpr std::size_t round_up(std::size_t value, std::size_t unit) noexcept {
  return (value + unit - 1) / unit * unit;
}

constexpr std::size_t row_stride(std::uint32_t local_size) noexcept {
  return sizeof(RowHead) + round_up(sizeof(SliceWord) * local_size, 64) + sizeof(RowEntry) * local_size;
}

constexpr std::size_t rows_bytes(std::uint32_t local_size) noexcept {
  return round_up(row_stride(local_size) * kMaxRows, kPage);
}

// An odd number of cache lines, so that copies do not compete for a few sets of a cache.
constexpr std::size_t copy_stride(std::uint32_t local_size) noexcept {
  return (round_up(sizeof(CopyHead) + kSmallBytes / local_size, 64) / 64 | 1) * 64;
}

constexpr std::size_t statuses_bytes(std::uint32_t local_size) noexcept {
  return round_up(sizeof(RankStatus) * local_size, kPage);
}

// A member in 16 bits: a server's bit moves down, kNobody stays all ones.
constexpr std::uint64_t pack_member(std::uint32_t member) noexcept { return (member & 0x7FFF) | (member >> 31 << 15); }
constexpr std::uint32_t unpack_member(std::uint64_t packed) noexcept {
  if (packed == 0xFFFF) return Failure::kNobody;
  return static_cast<std::uint32_t>((packed & 0x7FFF) | (packed >> 15 << 31));
}

}  // namespace

bool Row::arrive(std::uint32_t local_rank, const Arrival& arrival) const noexcept {
  RowEntry& mine = entries_[local_rank];
  mine.round.store(2 * arrival.round - 1, std::memory_order_relaxed);
  mine.hash.store(arrival.hash, std::memory_order_release);  // who sees it sees that the last round is over
  mine.input.store(arrival.input.bits(), std::memory_order_relaxed);
  mine.output.store(arrival.output.bits(), std::memory_order_relaxed);
  mine.keeps.store(arrival.keeps ? 1 : 0, std::memory_order_relaxed);
  mine.caller.store(arrival.caller, std::memory_order_relaxed);
  if (arrival.staged) mine.staged.store(arrival.round, std::memory_order_relaxed);
  if (arrival.copied) mine.copied.store(arrival.round, std::memory_order_relaxed);
  mine.round.store(2 * arrival.round, std::memory_order_seq_cst);  // see "arrival" above
  return all_arrived(arrival.round);
}

bool Row::has_arrived(std::uint32_t local_rank, std::uint64_t round) const noexcept {
  return entries_[local_rank].round.load(std::memory_order_seq_cst) >= 2 * round;
}

bool Row::all_arrived(std::uint64_t round) const noexcept {
  for (std::uint32_t rank = 0; rank < ranks_; ++rank) {
    if (!has_arrived(rank, round)) return false;
  }
  return true;
}

Row::Meeting Row::meeting(std::uint64_t round, std::uint64_t hash) const noexcept {
  if (!all_arrived(round)) return Meeting::kMissing;
  bool agree = true;
  for (std::uint32_t rank = 0; rank < ranks_; ++rank) {
    const std::uint64_t said = entries_[rank].hash.load(std::memory_order_acquire);
    if (entries_[rank].round.load(std::memory_order_acquire) != 2 * round) return Meeting::kOver;
    agree = agree && said == hash;
  }
  return agree ? Meeting::kAgree : Meeting::kDisagree;
}

bool Row::all_staged(std::uint64_t round) const noexcept {
  for (std::uint32_t rank = 0; rank < ranks_; ++rank) {
    if (entries_[rank].staged.load(std::memory_order_seq_cst) < round) return false;
  }
  return true;
}

int Row::claim(std::uint64_t round, std::uint32_t preferred, std::uint32_t slice_count) const noexcept {
  for (std::uint32_t step = 0; step < slice_count; ++step) {
    const std::uint32_t slice = (preferred + step) % slice_count;
    if (slice != preferred && entries_[slice].keeps.load(std::memory_order_relaxed) != 0) continue;
    std::uint64_t seen = slices_[slice].claimed.load(std::memory_order_relaxed);
    while (seen < round) {
      // acquire: the entries of all ranks, published before the row was ready, are read next.
      if (slices_[slice].claimed.compare_exchange_weak(seen, round, std::memory_order_acq_rel,
                                                       std::memory_order_relaxed)) {
        return static_cast<int>(slice);
      }
    }
  }
  return -1;
}

bool Row::finish_slice(std::uint64_t round, std::uint32_t slice, std::uint32_t local_rank,
                       std::uint32_t slice_count) const noexcept {
  slices_[slice].done.store(round << 8 | local_rank, std::memory_order_seq_cst);  // see "slices" above
  return all_done(round, slice_count);
}

bool Row::all_done(std::uint64_t round, std::uint32_t slice_count) const noexcept {
  for (std::uint32_t slice = 0; slice < slice_count; ++slice) {
    if (slices_[slice].done.load(std::memory_order_seq_cst) >> 8 < round) return false;
  }
  return true;
}

std::uint32_t Row::executor(std::uint32_t slice) const noexcept {
  return static_cast<std::uint32_t>(slices_[slice].done.load(std::memory_order_acquire) & 0xFF);
}

bool Row::finish_copying(std::uint64_t round, std::uint32_t local_rank) const noexcept {
  entries_[local_rank].copied.store(round, std::memory_order_seq_cst);  // the same pattern as for slices
  return all_copied(round);
}

bool Row::finish_staging(std::uint64_t round, std::uint32_t local_rank) const noexcept {
  entries_[local_rank].staged.store(round, std::memory_order_seq_cst);  // the same pattern as for slices
  return all_staged(round);
}

bool Row::all_copied(std::uint64_t round) const noexcept {
  for (std::uint32_t rank = 0; rank < ranks_; ++rank) {
    if (entries_[rank].copied.load(std::memory_order_seq_cst) < round) return false;
  }
  return true;
}

void Row::fail(std::uint64_t round, Failure failure) const noexcept {
  const std::uint64_t word =
      (round << 24) | (static_cast<std::uint64_t>(failure.code) << 16) | pack_member(failure.member);
  std::uint64_t seen = head_->failed.load(std::memory_order_relaxed);
  // The first verdict on a round stays; an older round gives way.
  while (seen >> 24 < round) {
    if (head_->failed.compare_exchange_weak(seen, word, std::memory_order_acq_rel, std::memory_order_relaxed)) return;
  }
}

Failure Row::failure(std::uint64_t round) const noexcept {
  const std::uint64_t word = head_->failed.load(std::memory_order_acquire);
  // A later round can only have failed after this one was over: see the callers, who look for success first.
  if (word >> 24 < round) return {};
  return {static_cast<Errc>((word >> 16) & 0xFF), unpack_member(word & 0xFFFF)};
}

bool Row::has_failed(std::uint64_t round) const noexcept {
  return head_->failed.load(std::memory_order_acquire) >> 24 == round;
}

ReadyTable::ReadyTable(Segment& segment, std::uint32_t local_rank, std::uint32_t local_size)
    : local_rank_(local_rank),
      local_size_(local_size),
      row_bytes_(row_stride(local_size)),
      copy_bytes_(copy_stride(local_size)) {
  COMMLIB_CHECK(local_size >= 1 && local_size <= kMaxLocalRanks && local_rank < local_size);
  COMMLIB_CHECK(segment.bytes() >= bytes_needed(local_size));
  // Zeros are a valid value of all of these types, so mapping is constructing.
  epoch_ = reinterpret_cast<std::atomic<std::uint64_t>*>(segment.data());
  first_leaver_ = epoch_ + 1;
  statuses_ = reinterpret_cast<RankStatus*>(segment.data() + kPage);
  rows_ = segment.data() + kPage + statuses_bytes(local_size);
  copies_ = rows_ + rows_bytes(local_size);
}

std::size_t ReadyTable::bytes_needed(std::uint32_t local_size) noexcept {
  const std::size_t copies = copy_stride(local_size) * local_size * 2 * kSmallRows;
  return kPage + statuses_bytes(local_size) + rows_bytes(local_size) + round_up(copies, kPage);
}

CopyHead* ReadyTable::copy(RowIndex index, std::uint32_t local_rank, std::uint64_t round) const noexcept {
  // Those of one rank in a row: who has many small tensors goes through them in order, and touches half as many pages.
  const std::size_t number = (round % 2 * local_size_ + local_rank) * kSmallRows + index;
  return reinterpret_cast<CopyHead*>(copies_ + number * copy_bytes_);
}

Row ReadyTable::row(RowIndex index) const noexcept {
  std::byte* base = rows_ + row_bytes_ * index;
  auto* head = reinterpret_cast<RowHead*>(base);
  auto* slices = reinterpret_cast<SliceWord*>(base + sizeof(RowHead));
  auto* entries = reinterpret_cast<RowEntry*>(base + row_bytes_ - sizeof(RowEntry) * local_size_);
  return {head, slices, entries, local_size_};
}

void ReadyTable::announce(RowIndex index, std::uint32_t to_local_rank, News news) const noexcept {
  // An update, though it changes nothing: a caller that stops waiting exchanges `caller` for 0 and looks at the row once
  // more, and whichever of the two updates comes second sees what the first one's thread did before it. An end has just
  // been written sequentially consistently, as that exchange is and the second look: there a load will do, which leaves
  // the other's cache line where it is.
  std::atomic<std::uint32_t>& told = row(index).entry(to_local_rank).caller;
  const std::uint32_t caller =
      news == News::kEnd ? told.load(std::memory_order_seq_cst) : told.fetch_add(0, std::memory_order_acq_rel);
  if (caller != 0 && caller <= kCallerSlots) {
    statuses_[to_local_rank].callers[caller - 1].ring();
  } else if (caller != kLooksLater || news == News::kWork) {
    post(index, to_local_rank);
  }
}

void ReadyTable::announce_all(RowIndex index, std::uint32_t but, News news) const noexcept {
  for (std::uint32_t rank = 0; rank < local_size_; ++rank) {
    if (rank != but) announce(index, rank, news);
  }
}

void ReadyTable::post(RowIndex index, std::uint32_t to_local_rank) const noexcept {
  RankStatus& status = statuses_[to_local_rank];
  // Bottom up; take() goes top down, so a bit below is never lost: at worst a word above points at nothing.
  status.leaf[index / 64].fetch_or(std::uint64_t{1} << index % 64, std::memory_order_acq_rel);
  status.middle[index / 4096].fetch_or(std::uint64_t{1} << index / 64 % 64, std::memory_order_acq_rel);
  status.top[index / 262144].fetch_or(std::uint64_t{1} << index / 4096 % 64, std::memory_order_acq_rel);
  status.doorbell.ring();
}

int ReadyTable::take(RowIndex* rows, int limit) const noexcept {
  RankStatus& status = statuses_[local_rank_];
  int taken = 0;
  for (std::uint32_t t = 0; t < sizeof(status.top) / sizeof(status.top[0]); ++t) {
    if (status.top[t].load(std::memory_order_relaxed) == 0) continue;
    std::uint64_t middles = status.top[t].exchange(0, std::memory_order_acq_rel);
    while (middles != 0) {
      const std::uint32_t m = t * 64 + static_cast<std::uint32_t>(__builtin_ctzll(middles));
      middles &= middles - 1;
      std::uint64_t leaves = status.middle[m].exchange(0, std::memory_order_acq_rel);
      while (leaves != 0) {
        const std::uint32_t l = m * 64 + static_cast<std::uint32_t>(__builtin_ctzll(leaves));
        if (taken + 64 > limit) {
          // No room for a whole leaf: put back what is above it.
          status.middle[m].fetch_or(leaves, std::memory_order_acq_rel);
          status.top[t].fetch_or(middles | std::uint64_t{1} << m % 64, std::memory_order_acq_rel);
          return taken;
        }
        leaves &= leaves - 1;
        std::uint64_t bits = status.leaf[l].exchange(0, std::memory_order_acq_rel);
        for (; bits != 0; bits &= bits - 1) rows[taken++] = l * 64 + static_cast<RowIndex>(__builtin_ctzll(bits));
      }
    }
  }
  return taken;
}

void ReadyTable::publish_cpus(const std::vector<int>& cpus) const noexcept {
  RankStatus& mine = statuses_[local_rank_];
  for (const int cpu : cpus) {
    const auto bit = static_cast<std::uint32_t>(cpu);
    if (bit < kMaxCpus) mine.cpus[bit / 64].fetch_or(std::uint64_t{1} << bit % 64, std::memory_order_relaxed);
  }
  mine.cpus_known.store(1, std::memory_order_release);
}

// Either this rank may run on as many CPUs as there are ranks, or on some on which no other rank may: as where a launcher
// binds each to its own.
Errc ReadyTable::enough_cpus() const noexcept {
  const RankStatus& mine = statuses_[local_rank_];
  std::uint32_t count = 0;
  bool is_shared = false;
  for (std::uint32_t rank = 0; rank < local_size_; ++rank) {
    const RankStatus& other = statuses_[rank];
    if (other.cpus_known.load(std::memory_order_acquire) == 0) return Errc::kAgain;
    for (std::uint32_t word = 0; word < kMaxCpus / 64; ++word) {
      const std::uint64_t bits = mine.cpus[word].load(std::memory_order_relaxed);
      if (rank == local_rank_) {
        count += static_cast<std::uint32_t>(__builtin_popcountll(bits));
      } else if ((bits & other.cpus[word].load(std::memory_order_relaxed)) != 0) {
        is_shared = true;
      }
    }
  }
  return count >= local_size_ || (count > 0 && !is_shared) ? Errc::kOk : Errc::kUnsupported;
}

bool ReadyTable::abort(std::uint32_t member, Cause cause) const noexcept {
  std::uint64_t expected = 0;
  const std::uint64_t word = kEpochBit | (static_cast<std::uint64_t>(cause) << 32) | member;
  const bool first =
      epoch_->compare_exchange_strong(expected, word, std::memory_order_acq_rel, std::memory_order_relaxed);
  ring_all();
  return first;
}

std::uint32_t ReadyTable::aborted_member() const noexcept {
  return static_cast<std::uint32_t>(epoch_->load(std::memory_order_acquire));
}

Cause ReadyTable::aborted_cause() const noexcept {
  return static_cast<Cause>((epoch_->load(std::memory_order_acquire) >> 32) & 0xFF);
}

void ReadyTable::note_leaver(std::uint32_t member) const noexcept {
  std::uint64_t none = 0;
  first_leaver_->compare_exchange_strong(none, kEpochBit | member, std::memory_order_acq_rel,
                                         std::memory_order_relaxed);
}

std::uint32_t ReadyTable::first_leaver() const noexcept {
  const std::uint64_t word = first_leaver_->load(std::memory_order_acquire);
  return word != 0 ? static_cast<std::uint32_t>(word) : Failure::kNobody;
}

void ReadyTable::leave(std::uint32_t member) const noexcept {
  note_leaver(member);
  statuses_[local_rank_].left.store(1, std::memory_order_release);
  ring_all();
}

bool ReadyTable::has_left(std::uint32_t local_rank) const noexcept {
  return statuses_[local_rank].left.load(std::memory_order_acquire) != 0;
}

void ReadyTable::ring_all() const noexcept {
  for (std::uint32_t rank = 0; rank < local_size_; ++rank) {
    statuses_[rank].doorbell.ring();
    for (Doorbell& caller : statuses_[rank].callers) caller.ring();
  }
}

}  // namespace commlib
