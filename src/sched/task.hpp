// SPDX-License-Identifier: Apache-2.0
// One submitted tensor (Operation), its partitions (PartTask), and how its end is told (Completion).
//
// An operation completes exactly once, with a result or with a failure, after all its parts have let go of its memory.
// The first failure wins. A finished operation goes to the FinishedList, from which the binding takes it to give back
// whatever kept the buffers alive; no thread of the core ever needs the binding's lock for that.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/errc.hpp"
#include "base/event_fd.hpp"
#include "base/frame.hpp"
#include "base/futex.hpp"
#include "base/ring.hpp"
#include "memory/buffer_view.hpp"
#include "sched/ready_table.hpp"

namespace commlib {

// Completions that an event loop of the binding wants to hear of: tokens, and a descriptor to wait on.
struct CompletionQueue {
  EventFd event;
  Inbox<std::uint64_t> tokens;

  void push(std::uint64_t token) {
    tokens.push(token);
    event.signal();
  }
};

class Completion {
 public:
  [[nodiscard]] bool done() const noexcept { return state_.load(std::memory_order_acquire) == kDone; }
  [[nodiscard]] Failure failure() const noexcept { return failure_; }  // valid once done

  // Once. Wakes whoever waits.
  void complete(Failure failure) noexcept;
  // Waits at most `timeout_ms` (−1: for ever); returns done().
  bool wait(int timeout_ms) noexcept;
  // Push `token` when done, or now if it is done already.
  void subscribe(std::shared_ptr<CompletionQueue> queue, std::uint64_t token);

 private:
  static constexpr std::uint32_t kOpen = 0, kDone = 1, kAwaited = 2;  // kAwaited: somebody may sleep
  std::atomic<std::uint32_t> state_{kOpen};  // published by complete(); the futex word of wait()
  // Somebody has subscribed. This and `state_` are each written and then the other read, so that a subscriber that finds it
  // not done is found by who completes it.
  std::atomic<bool> has_subscribers_{false};
  Failure failure_{};
  std::mutex mutex_;  // guards subscribers_; a leaf in the order, nothing is called with it held but Inbox::push
  std::vector<std::pair<std::shared_ptr<CompletionQueue>, std::uint64_t>> subscribers_;
};

// What all ranks of a job know of a name, and this process's rounds of it.
struct KeyRecord {
  std::string name;
  std::uint64_t declared_key = 0;
  std::uint64_t cursor = 0;                                 // first byte in the job's virtual byte space
  std::vector<std::pair<RowIndex, std::uint32_t>> extents;  // first row, rows
  std::atomic<std::uint64_t> round{0};                      // rounds submitted by this process
  std::atomic<bool> in_flight{false};

  // A name has one round in flight: false if it has one already. Taken until the operation completes, or `give_back`.
  [[nodiscard]] bool try_take() noexcept { return !in_flight.exchange(true, std::memory_order_acq_rel); }
  void give_back() noexcept { in_flight.store(false, std::memory_order_release); }

  // Only by who has taken the key.
  [[nodiscard]] std::uint32_t rows() const noexcept {
    std::uint32_t total = 0;
    for (const auto& extent : extents) total += extent.second;
    return total;
  }
  [[nodiscard]] std::uint64_t rounds() const noexcept { return round.load(std::memory_order_relaxed); }
  [[nodiscard]] RowIndex row_of(std::uint32_t part) const noexcept {
    for (const auto& [first, count] : extents) {
      if (part < count) return first + part;
      part -= count;
    }
    return 0;  // the façade has checked that part < rows()
  }
};

struct Operation;

// Who may touch a task right now. Events that arrive at the local loop for a task that somebody else holds are remembered.
enum class Holder : std::uint32_t {
  kSubmitter = 0,        // also who polls it
  kSubmitterMissed = 1,  // the same, and the loop has been told of it meanwhile
  kCaller = 2,           // the thread that waits for it
  kLoop = 3,
  kExchange = 4,
  kNobody = 5,  // whoever comes first: who waits or polls, or the loop if there is something to do
};

struct PartTask {
  Operation* operation = nullptr;
  std::uint32_t part = 0;
  std::uint64_t first = 0;  // first element in the tensor
  std::uint64_t count = 0;  // elements
  RowIndex row_index = 0;
  Row row;
  std::uint32_t slice_count = 1;
  std::uint8_t stage = 0;              // position in the plan
  bool finished = false;               // its holder's
  bool keeps_own_slice = false;        // it was not staged
  bool admission_asked = false;        // the local root's
  bool granted_locally = false;        // holds budget of the local admission
  std::uint64_t staging = UINT64_MAX;  // offset in the own arena, or UINT64_MAX
  std::uint64_t staging_charge = 0;    // bytes charged to the staging budget of this process
  std::atomic<Holder> holder{Holder::kSubmitter};
  std::atomic<bool> in_exchange{
      false};                    // set by the holder when handed over, cleared by the exchange when it has let go
  PartTask* previous = nullptr;  // TaskTable's list
  PartTask* next = nullptr;

  [[nodiscard]] const std::byte* input() const noexcept;
  [[nodiscard]] std::byte* output() const noexcept;
  [[nodiscard]] std::uint64_t key() const noexcept;
  [[nodiscard]] std::size_t bytes() const noexcept;
};

struct Operation {
  std::shared_ptr<KeyRecord> key;
  std::uint64_t round = 0;
  std::uint64_t hash = 0;  // of the signature
  Collective collective = Collective::kReduce;
  ReduceOp op = ReduceOp::kSum;
  DType dtype = DType::kFloat32;
  std::uint32_t root = 0;  // global rank, for broadcasts
  std::int32_t priority = 0;
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  std::uint64_t count = 0;
  std::uint32_t caller_slot = 0;  // 1 + slot of the caller that carries it out, or 0: it has none, or does not sleep
  bool is_callers = false;        // that thread carries it out, with a slot or without
  std::int64_t submitted_ms = 0;
  void* custody = nullptr;  // the binding's; what keeps input and output alive

  std::unique_ptr<PartTask[]> parts;
  std::uint32_t part_count = 0;
  std::atomic<std::uint32_t> parts_left{0};
  std::atomic<std::uint64_t> first_failure{0};  // code << 32 | member
  Completion completion;

  std::shared_ptr<Operation> self;     // while in flight or not yet reaped
  Operation* next_finished = nullptr;  // FinishedList

  [[nodiscard]] std::size_t bytes() const noexcept { return count * item_bytes(dtype); }
  [[nodiscard]] bool has_failed() const noexcept { return first_failure.load(std::memory_order_acquire) != 0; }
  void note_failure(Failure failure) noexcept;
};

inline const std::byte* PartTask::input() const noexcept {
  return operation->input + first * item_bytes(operation->dtype);
}
inline std::byte* PartTask::output() const noexcept { return operation->output + first * item_bytes(operation->dtype); }
inline std::uint64_t PartTask::key() const noexcept { return operation->key->declared_key << 16 | part; }
inline std::size_t PartTask::bytes() const noexcept { return count * item_bytes(operation->dtype); }

// A round of a name about which the ranks disagree, for the control plane to explain.
struct Disagreement {
  std::string name;
  std::uint64_t round;
};

// Finished operations, for the binding to reap. Any thread pushes and takes.
class FinishedList {
 public:
  FinishedList() = default;
  ~FinishedList();
  void push(Operation* operation) noexcept;
  // nullptr if there is none. The caller gives `custody` back and drops the pointer.
  [[nodiscard]] std::shared_ptr<Operation> take() noexcept;

  Inbox<Disagreement> disagreements;
  EventFd disagreement_event;  // signalled when there is one

 private:
  std::atomic<Operation*> head_{nullptr};
  std::mutex mutex_;                    // guards taken_; a leaf in the order
  Operation* taken_ = nullptr;          // taken off head_, not yet given out
  std::atomic<bool> has_taken_{false};  // asked without the lock; who reads an old value comes again
};

// A part has let go of the operation's memory. The last one completes the operation.
void finish_part(PartTask& task, Failure failure, FinishedList& finished) noexcept;

// The tasks this process has in flight: by row for announcements, and as a list for failure and for stall reports.
class TaskTable {
 public:
  TaskTable();
  ~TaskTable();
  void add(PartTask& task) noexcept;
  void remove(PartTask& task) noexcept;
  // For the local loop: the task of a row if the loop holds it, or nobody, who then loses it to the loop. If the submitter
  // still holds it, it is told (kSubmitterMissed).
  // A task that the loop holds is removed by the loop alone, so the pointer stays good.
  [[nodiscard]] PartTask* held_by_loop(RowIndex row) noexcept;
  // The task of a row if nobody held it; from here on the caller does, as its submitter.
  [[nodiscard]] PartTask* take_from_nobody(RowIndex row) noexcept;
  // Whoever holds it. Only where nobody else can finish it meanwhile.
  [[nodiscard]] PartTask* find(RowIndex row) const noexcept;
  // Rows of all tasks in flight.
  void rows(std::vector<RowIndex>* out) const;
  // For each operation in flight that was submitted before `before_ms`: key, name and round. Oldest first, at most `limit`.
  struct Waiting {
    std::string name;
    std::uint64_t round;
    std::int64_t submitted_ms;
  };
  void waiting(std::int64_t before_ms, std::size_t limit, std::vector<Waiting>* out) const;

 private:
  mutable std::mutex
      mutex_;         // guards all below, and that a task is not freed while it is looked at; a leaf in the order
  PartTask** slots_;  // kMaxRows of them, in untouched pages until used
  PartTask* head_ = nullptr;
  PartTask* tail_ = nullptr;
};

}  // namespace commlib
