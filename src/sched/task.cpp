// SPDX-License-Identifier: Apache-2.0
#include "sched/task.hpp"

#include <sys/mman.h>

#include <cerrno>

namespace commlib {

void Completion::complete(Failure failure) noexcept {
  failure_ = failure;
  const std::uint32_t before = state_.exchange(kDone, std::memory_order_seq_cst);
  if (before == kAwaited) futex_wake(state_, INT32_MAX);
  if (!has_subscribers_.load(std::memory_order_seq_cst)) return;  // as is most often so: no lock
  std::vector<std::pair<std::shared_ptr<CompletionQueue>, std::uint64_t>> subscribers;
  {
    const std::lock_guard lock(mutex_);
    subscribers.swap(subscribers_);
  }
  for (auto& [queue, token] : subscribers) queue->push(token);
}

bool Completion::wait(int timeout_ms) noexcept {
  std::uint32_t seen = kOpen;
  // A failed exchange says that it is done, or that another thread has already said that it sleeps here.
  (void)state_.compare_exchange_strong(seen, kAwaited, std::memory_order_acq_rel, std::memory_order_acquire);
  if (seen != kDone) futex_wait(state_, kAwaited, timeout_ms);
  return done();
}

void Completion::subscribe(std::shared_ptr<CompletionQueue> queue, std::uint64_t token) {
  {
    const std::lock_guard lock(mutex_);
    has_subscribers_.store(true, std::memory_order_seq_cst);
    if (state_.load(std::memory_order_seq_cst) != kDone) {
      subscribers_.emplace_back(std::move(queue), token);
      return;
    }
  }
  queue->push(token);
}

void Operation::note_failure(Failure failure) noexcept {
  std::uint64_t none = 0;
  const std::uint64_t word = static_cast<std::uint64_t>(failure.code) << 32 | failure.member;
  first_failure.compare_exchange_strong(none, word, std::memory_order_acq_rel, std::memory_order_relaxed);
}

FinishedList::~FinishedList() {
  while (take() != nullptr) {
  }
}

void FinishedList::push(Operation* operation) noexcept {
  operation->next_finished = head_.load(std::memory_order_relaxed);
  while (!head_.compare_exchange_weak(operation->next_finished, operation, std::memory_order_release,
                                      std::memory_order_relaxed)) {
  }
}

std::shared_ptr<Operation> FinishedList::take() noexcept {
  if (head_.load(std::memory_order_relaxed) == nullptr && !has_taken_.load(std::memory_order_relaxed)) return nullptr;
  const std::lock_guard lock(mutex_);
  if (taken_ == nullptr) taken_ = head_.exchange(nullptr, std::memory_order_acquire);
  if (taken_ == nullptr) return nullptr;
  Operation* operation = taken_;
  taken_ = operation->next_finished;
  has_taken_.store(taken_ != nullptr, std::memory_order_relaxed);
  return std::move(operation->self);
}

void finish_part(PartTask& task, Failure failure, FinishedList& finished) noexcept {
  Operation* operation = task.operation;
  if (failure.code != Errc::kOk) operation->note_failure(failure);
  if (operation->parts_left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  const std::uint64_t word = operation->first_failure.load(std::memory_order_acquire);
  const Failure outcome{static_cast<Errc>(word >> 32), static_cast<std::uint32_t>(word)};
  // The name is free before anybody can learn that the operation is over.
  operation->key->give_back();
  if (outcome.code == Errc::kMismatch) {
    finished.disagreements.push({operation->key->name, operation->round});
    finished.disagreement_event.signal();
  }
  const std::shared_ptr<Operation> keep = operation->self;  // the binding may reap and drop it at once
  finished.push(operation);
  keep->completion.complete(outcome);
}

TaskTable::TaskTable() {
  void* memory = ::mmap(nullptr, sizeof(PartTask*) * kMaxRows, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw_os_error("cannot map the task table", errno);
  slots_ = static_cast<PartTask**>(memory);
}

TaskTable::~TaskTable() { ::munmap(slots_, sizeof(PartTask*) * kMaxRows); }

void TaskTable::add(PartTask& task) noexcept {
  const std::lock_guard lock(mutex_);
  task.previous = tail_;
  task.next = nullptr;
  (tail_ != nullptr ? tail_->next : head_) = &task;
  tail_ = &task;
  slots_[task.row_index] = &task;
}

void TaskTable::remove(PartTask& task) noexcept {
  const std::lock_guard lock(mutex_);
  slots_[task.row_index] = nullptr;
  (task.previous != nullptr ? task.previous->next : head_) = task.next;
  (task.next != nullptr ? task.next->previous : tail_) = task.previous;
}

PartTask* TaskTable::held_by_loop(RowIndex row) noexcept {
  const std::lock_guard lock(mutex_);
  PartTask* task = slots_[row];
  if (task == nullptr) return nullptr;
  Holder seen = task->holder.load(std::memory_order_acquire);
  while (seen == Holder::kSubmitter || seen == Holder::kNobody) {
    const Holder next = seen == Holder::kNobody ? Holder::kLoop : Holder::kSubmitterMissed;
    if (task->holder.compare_exchange_weak(seen, next, std::memory_order_acq_rel, std::memory_order_acquire))
      seen = next;
  }
  return seen == Holder::kLoop ? task : nullptr;
}

PartTask* TaskTable::take_from_nobody(RowIndex row) noexcept {
  const std::lock_guard lock(mutex_);
  PartTask* task = slots_[row];
  Holder expected = Holder::kNobody;
  const bool is_taken =
      task != nullptr && task->holder.compare_exchange_strong(expected, Holder::kSubmitter, std::memory_order_acq_rel);
  return is_taken ? task : nullptr;
}

PartTask* TaskTable::find(RowIndex row) const noexcept {
  const std::lock_guard lock(mutex_);
  return slots_[row];
}

void TaskTable::rows(std::vector<RowIndex>* out) const {
  const std::lock_guard lock(mutex_);
  for (const PartTask* task = head_; task != nullptr; task = task->next) out->push_back(task->row_index);
}

void TaskTable::waiting(std::int64_t before_ms, std::size_t limit, std::vector<Waiting>* out) const {
  const std::lock_guard lock(mutex_);
  for (const PartTask* task = head_; task != nullptr && out->size() < limit; task = task->next) {
    const Operation& operation = *task->operation;
    if (operation.submitted_ms > before_ms) continue;
    // It is over, and nobody has looked yet.
    const bool is_unseen = task->holder.load(std::memory_order_acquire) == Holder::kNobody;
    if (is_unseen && task->row.all_done(operation.round, task->slice_count)) continue;
    if (!out->empty() && out->back().name == operation.key->name && out->back().round == operation.round) continue;
    out->push_back({operation.key->name, operation.round, operation.submitted_ms});
  }
}

}  // namespace commlib
