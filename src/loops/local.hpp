// SPDX-License-Identifier: Apache-2.0
// What the stages on one host need to know of their process and its neighbours. Made once, from the topology; the façade
// owns everything named here.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "base/log.hpp"
#include "memory/arena.hpp"
#include "sched/ready_table.hpp"
#include "sched/task.hpp"

namespace commlib {

// How other hosts are reached from a local root; behind it is the exchange, on another thread.
class ExchangeDoor {
 public:
  virtual ~ExchangeDoor() = default;
  // All ranks of the host have arrived; do they agree? The task stays the exchange's, too, until in_exchange is cleared.
  virtual void announce(PartTask& task, bool agree) noexcept = 0;
  // This host will announce nothing more, because `member` has left. May be repeated.
  virtual void leave(std::uint32_t member) noexcept = 0;
  // The host's partial is complete.
  virtual void contribute(PartTask& task) noexcept = 0;
};

// Which rows of a host may take staging, so that it is bounded and never held in a circle: one budget for the whole host,
// kept by the local root. Any thread of that process.
class LocalAdmission {
 public:
  LocalAdmission(ReadyTable& table, std::uint64_t budget_bytes)
      : table_(table), left_bytes_(budget_bytes), budget_bytes_(budget_bytes) {}
  // Grants the row now or when there is room; the highest priority first. A row larger than the budget is granted alone.
  void ask(RowIndex row, std::uint64_t round, std::uint64_t bytes, std::int32_t priority) noexcept;
  void give_back(std::uint64_t bytes) noexcept;

 private:
  struct Waiting {
    RowIndex row;
    std::uint64_t round;
    std::uint64_t bytes;
    std::int32_t priority;
  };
  void grant_on(std::unique_lock<std::mutex>& lock) noexcept;

  ReadyTable& table_;
  std::mutex mutex_;  // guards what follows; released before rows are announced
  std::uint64_t left_bytes_;
  const std::uint64_t budget_bytes_;
  std::vector<Waiting> waiting_;
};

struct LocalContext {
  LocalContext(ReadyTable& ready_table, TaskTable& task_table, FinishedList& finished_list, Arena& own_arena,
               std::atomic<std::uint64_t>& staged) noexcept
      : table(ready_table), tasks(task_table), finished(finished_list), arena(own_arena), staged_bytes(staged) {}

  ReadyTable& table;
  TaskTable& tasks;
  FinishedList& finished;
  Arena& arena;                              // the own one
  std::atomic<std::uint64_t>& staged_bytes;  // staging this process has taken at submission
  std::vector<std::byte*> arena_bases;       // by local rank
  std::vector<int> pids;                     // by local rank
  std::vector<std::uint32_t> global_ranks;   // by local rank
  std::uint32_t local_rank = 0;
  std::uint32_t local_size = 1;
  bool several_hosts = false;
  LocalAdmission* admission = nullptr;  // the local root's
  ExchangeDoor* exchange = nullptr;     // the local root's, in a job on several hosts
  LogBuffer* log = nullptr;

  [[nodiscard]] bool is_local_root() const noexcept { return local_rank == 0; }
  // Local rank of a broadcast's root, −1 if it is on another host.
  [[nodiscard]] int local_root_of(const Operation& operation) const noexcept {
    for (std::uint32_t rank = 0; rank < local_size; ++rank) {
      if (global_ranks[rank] == operation.root) return static_cast<int>(rank);
    }
    return -1;
  }
  // Has this rank what a broadcast sends? Then it gets nothing: its memory may be read-only.
  [[nodiscard]] bool has_it(const Operation& operation) const noexcept {
    return operation.collective == Collective::kBroadcast && operation.root == global_ranks[local_rank] &&
           operation.input == operation.output;
  }
  // Is it quicker for every rank to read what all have put in, and sum for itself, than to have it done by one?
  [[nodiscard]] bool is_small(const Operation& operation) const noexcept {
    return !several_hosts && local_size > 1 && operation.part_count == 1 &&
           operation.bytes() * local_size <= kSmallBytes && operation.key->row_of(0) < kSmallRows;
  }
  // Does this host put anything in?
  [[nodiscard]] bool contributes(const Operation& operation) const noexcept {
    return is_sum(operation.collective) ||
           (operation.collective == Collective::kBroadcast && local_root_of(operation) >= 0);
  }
};

}  // namespace commlib
