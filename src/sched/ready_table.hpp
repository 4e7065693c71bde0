// SPDX-License-Identifier: Apache-2.0
// The ready table: the shared memory in which the ranks of one host meet. It says who has arrived where, who does which
// slice, what is finished, who lives, and whether the job has failed. It holds no data.
//
// Any thread of any local process may call anything here; nothing blocks. A process that dies leaves no lock behind,
// because there is none.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/errc.hpp"
#include "base/futex.hpp"
#include "memory/segment.hpp"

namespace commlib {

using RowIndex = std::uint32_t;
inline constexpr RowIndex kMaxRows = 1u << 22;
inline constexpr std::uint32_t kMaxLocalRanks = 240;
inline constexpr std::uint32_t kMaxCpus = 1024;
inline constexpr std::uint64_t kProbeValue = 0x636F6D6D6C696231;
inline constexpr std::uint32_t kCallerSlots = 32;  // synchronous callers of one process that may sleep at once
// RowEntry::caller: nobody waits, and somebody will look. Told when there is something to do, not that all is done.
inline constexpr std::uint32_t kLooksLater = kCallerSlots + 1;

// Where bytes of a rank lie, as every local process can understand it: an offset in somebody's arena, or an address in
// the rank's own process (for process_vm_readv).
class Place {
 public:
  static constexpr Place in_arena(std::uint32_t local_rank, std::uint64_t offset) noexcept {
    return Place((std::uint64_t{local_rank} << kShift) | offset);
  }
  static Place at_address(const void* address) noexcept {
    return Place((std::uint64_t{kAddress} << kShift) | reinterpret_cast<std::uintptr_t>(address));
  }
  static constexpr Place nowhere() noexcept { return Place(std::uint64_t{kNowhere} << kShift); }
  static constexpr Place from_bits(std::uint64_t bits) noexcept { return Place(bits); }

  [[nodiscard]] bool is_address() const noexcept { return bits_ >> kShift == kAddress; }
  [[nodiscard]] bool is_nowhere() const noexcept { return bits_ >> kShift == kNowhere; }
  [[nodiscard]] std::uint32_t arena() const noexcept { return static_cast<std::uint32_t>(bits_ >> kShift); }
  [[nodiscard]] std::uint64_t offset() const noexcept { return bits_ & ((std::uint64_t{1} << kShift) - 1); }
  [[nodiscard]] std::uint64_t bits() const noexcept { return bits_; }

 private:
  static constexpr int kShift = 56;  // user-space addresses have 47 bits, 56 with five-level paging
  static constexpr std::uint8_t kAddress = 0xFE;
  static constexpr std::uint8_t kNowhere = 0xFF;
  explicit constexpr Place(std::uint64_t bits) noexcept : bits_(bits) {}
  std::uint64_t bits_;
};

// How a round, or the job, failed.
struct Failure {
  Errc code = Errc::kOk;
  std::uint32_t member = 0;  // global rank, or kServerBit (sched/wire.hpp) | server index, or kNobody
  static constexpr std::uint32_t kNobody = 0xFFFFFFFF;
};

// Why a member was lost; in words in commlib/errors.py.
enum class Cause : std::uint8_t {
  kUnknown = 0,
  kDied = 1,         // its process has ended
  kClosed = 2,       // end of file on a connection
  kReset = 3,        // a connection failed
  kSilent = 4,       // no sign of life for the peer timeout
  kMalformed = 5,    // it sent what no member sends
  kInternal = 6,     // it found a bug of its own
  kLeft = 7,         // it shut down in order, but is needed
  kToldSo = 8,       // the scheduler says so
  kMemory = 9,       // its arena is full
  kUnreadable = 10,  // the memory it has given cannot be read
};

// What one rank says of one partition. Written by that rank only.
struct alignas(64) RowEntry {
  std::atomic<std::uint64_t>
      round;                        // 2r: has arrived in round r, and the fields below speak of it; 2r − 1: is arriving
  std::atomic<std::uint64_t> hash;  // of the signature
  std::atomic<std::uint64_t> input;   // Place
  std::atomic<std::uint64_t> output;  // Place
  std::atomic<std::uint64_t> staged;  // round for which `input` can be read and `output` written by everybody
  std::atomic<std::uint64_t> copied;  // round whose result this rank has taken
  std::atomic<std::uint32_t> keeps;   // 1: slice number `its own rank` is not at `input`, and nobody else's to do
  std::atomic<std::uint32_t> caller;  // 0: announce through the bitmap; 1 + the caller slot that waits; kLooksLater
};
static_assert(sizeof(RowEntry) == 64);

// A small sum: each rank leaves a copy of its input in the table, of the last even and of the last odd such round. Who is in
// round r + 2 knows that nobody is in round r any more, and may write there.
inline constexpr std::size_t kSmallBytes = 4 * 1024;  // all inputs together
inline constexpr RowIndex kSmallRows = 16 * 1024;     // rows with room for copies, the first ones

// What stands before a copy: all that is said of a small sum, so that it can be read in round r + 1, too.
struct CopyHead {
  std::uint64_t round;
  std::uint64_t hash;  // of the signature
};

struct alignas(64) RowHead {
  std::atomic<std::uint64_t> granted;    // round that may take staging and be reduced
  std::atomic<std::uint64_t> exchanged;  // round whose result is at `partial`
  std::atomic<std::uint64_t> partial;    // Place: this host's partial
  std::atomic<std::uint64_t> result;     // Place: the result
  std::atomic<std::uint64_t> failed;     // round << 24 | code << 16 | member
};

// One slice of a row: moved from an older round to this one by whoever does it, then marked done.
struct SliceWord {
  std::atomic<std::uint64_t> claimed;
  std::atomic<std::uint64_t> done;  // round << 8 | local rank that did it
};

// A partition's row, seen by one process. A view; copies are cheap.
class Row {
 public:
  Row() = default;
  Row(RowHead* head, SliceWord* slices, RowEntry* entries, std::uint32_t ranks) noexcept
      : head_(head), slices_(slices), entries_(entries), ranks_(ranks) {}

  [[nodiscard]] RowHead& head() const noexcept { return *head_; }
  [[nodiscard]] RowEntry& entry(std::uint32_t local_rank) const noexcept { return entries_[local_rank]; }

  struct Arrival {
    std::uint64_t round;
    std::uint64_t hash;
    Place input;
    Place output;
    bool staged;           // the places can be reached by everybody
    bool copied;           // nothing will have to be collected into `output`
    bool keeps;            // as RowEntry::keeps
    std::uint32_t caller;  // as RowEntry::caller
  };
  // Arrive; true if from here all ranks are seen to have arrived (of several that arrive at once, more than one may see it).
  [[nodiscard]] bool arrive(std::uint32_t local_rank, const Arrival& arrival) const noexcept;

  [[nodiscard]] bool all_arrived(std::uint64_t round) const noexcept;
  [[nodiscard]] bool has_arrived(std::uint32_t local_rank, std::uint64_t round) const noexcept;
  [[nodiscard]] bool all_staged(std::uint64_t round) const noexcept;

  enum class Meeting {
    kMissing,   // somebody has not arrived
    kAgree,     // all are in this round, with this signature; the round can now only be carried out
    kDisagree,  // all are in this round, with different ones
    kOver,      // somebody is through with this round: it is done, or it has failed
  };
  [[nodiscard]] Meeting meeting(std::uint64_t round, std::uint64_t hash) const noexcept;

  // Take a slice that nobody has taken in this round, `preferred` first; −1 if there is none left that `preferred`, a local
  // rank, may do.
  [[nodiscard]] int claim(std::uint64_t round, std::uint32_t preferred, std::uint32_t slice_count) const noexcept;
  // Mark it done; true if from here all slices are seen to be done.
  [[nodiscard]] bool finish_slice(std::uint64_t round, std::uint32_t slice, std::uint32_t local_rank,
                                  std::uint32_t slice_count) const noexcept;
  [[nodiscard]] bool all_done(std::uint64_t round, std::uint32_t slice_count) const noexcept;
  [[nodiscard]] std::uint32_t executor(std::uint32_t slice) const noexcept;  // who did it; valid once done

  // This rank's input and output can be reached now; true if from here everybody's can.
  [[nodiscard]] bool finish_staging(std::uint64_t round, std::uint32_t local_rank) const noexcept;

  // This rank needs nobody's memory any more in this round; true if from here nobody does.
  [[nodiscard]] bool finish_copying(std::uint64_t round, std::uint32_t local_rank) const noexcept;
  [[nodiscard]] bool all_copied(std::uint64_t round) const noexcept;

  void fail(std::uint64_t round, Failure failure) const noexcept;
  [[nodiscard]] Failure failure(std::uint64_t round) const noexcept;  // kOk if neither it nor a later one has failed
  [[nodiscard]] bool has_failed(std::uint64_t round) const noexcept;  // this one, not a later one

 private:
  RowHead* head_ = nullptr;
  SliceWord* slices_ = nullptr;
  RowEntry* entries_ = nullptr;
  std::uint32_t ranks_ = 0;
};

// Why a row is announced.
enum class News : std::uint8_t {
  kWork,  // there may be something to do
  kEnd,   // all slices are done, or all copied (just said so by this thread); who looks will see it
};

// One process of the host, as the others see it.
struct alignas(64) RankStatus {
  Doorbell doorbell;                        // rung when a bit of its bitmap is set, and on failure
  std::atomic<std::uint32_t> left;          // 1: it has shut down in order
  std::atomic<std::uint64_t> beat_ms;       // CLOCK_MONOTONIC of its last beat
  std::atomic<std::uint64_t> probe;         // address of a word with kProbeValue in that process; 0 before it is set
  std::atomic<std::uint32_t> reachable_by;  // how many other ranks have read that word through the kernel
  std::atomic<std::uint32_t> cpus_known;    // 1: `cpus` is written
  std::atomic<std::uint64_t> cpus[kMaxCpus / 64];  // bit set: may run there
  alignas(64) Doorbell callers[kCallerSlots];
  std::atomic<std::uint64_t> top[kMaxRows / (64 * 64 * 64)];
  std::atomic<std::uint64_t> middle[kMaxRows / (64 * 64)];
  std::atomic<std::uint64_t> leaf[kMaxRows / 64];
};

class ReadyTable {
 public:
  // `segment` must have bytes_needed(local_size) bytes, all zero when the first rank maps it, and outlive the table.
  ReadyTable(Segment& segment, std::uint32_t local_rank, std::uint32_t local_size);
  [[nodiscard]] static std::size_t bytes_needed(std::uint32_t local_size) noexcept;

  [[nodiscard]] Row row(RowIndex index) const noexcept;
  // Where the copy of a rank's input in a round like this one is, for rows below kSmallRows; behind the head.
  [[nodiscard]] CopyHead* copy(RowIndex index, std::uint32_t local_rank, std::uint64_t round) const noexcept;
  [[nodiscard]] RankStatus& status(std::uint32_t local_rank) const noexcept { return statuses_[local_rank]; }
  [[nodiscard]] std::uint32_t local_rank() const noexcept { return local_rank_; }
  [[nodiscard]] std::uint32_t local_size() const noexcept { return local_size_; }

  // Tell one rank, or all but one, that row `index` has changed: its waiting caller if it has one, else its local loop.
  void announce(RowIndex index, std::uint32_t to_local_rank, News news = News::kWork) const noexcept;
  void announce_all(RowIndex index, std::uint32_t but = UINT32_MAX, News news = News::kWork) const noexcept;
  // Set the bit of a row for the own local loop, whatever the entry says.
  void post(RowIndex index, std::uint32_t to_local_rank) const noexcept;
  // Take up to `limit` announced rows of the own rank; at least 64, for they are taken by the leaf.
  [[nodiscard]] int take(RowIndex* rows, int limit) const noexcept;

  // Say where this rank may run, once.
  void publish_cpus(const std::vector<int>& cpus) const noexcept;
  // Is there a CPU for each rank, so that one that spins does not keep another from running? kAgain: not all have said yet
  // where they may run; kOk: yes; kUnsupported: no, or nobody can tell.
  [[nodiscard]] Errc enough_cpus() const noexcept;

  // The job has failed: the first to say so wins. Rings everybody.
  bool abort(std::uint32_t member, Cause cause) const noexcept;
  [[nodiscard]] bool aborted() const noexcept { return epoch_->load(std::memory_order_acquire) != 0; }
  [[nodiscard]] std::uint32_t aborted_member() const noexcept;
  [[nodiscard]] Cause aborted_cause() const noexcept;

  // This rank, `member` of the job, leaves in order; the others are rung, so that what waits for it can fail.
  void leave(std::uint32_t member) const noexcept;
  [[nodiscard]] bool has_left(std::uint32_t local_rank) const noexcept;
  // The first member of the job to leave, as far as this host knows; kNobody: none has. Others may leave because it has.
  void note_leaver(std::uint32_t member) const noexcept;
  [[nodiscard]] std::uint32_t first_leaver() const noexcept;
  void ring_all() const noexcept;

 private:
  std::uint32_t local_rank_;
  std::uint32_t local_size_;
  std::atomic<std::uint64_t>* epoch_;         // 0, or 1 << 63 | cause << 32 | member
  std::atomic<std::uint64_t>* first_leaver_;  // 0, or 1 << 63 | member
  RankStatus* statuses_;
  std::byte* rows_;
  std::size_t row_bytes_;
  std::byte* copies_;
  std::size_t copy_bytes_;
};

}  // namespace commlib
