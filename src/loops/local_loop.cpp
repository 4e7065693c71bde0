// SPDX-License-Identifier: Apache-2.0
#include "loops/local_loop.hpp"

#include <algorithm>

#include "loops/plan.hpp"

namespace commlib {

namespace {
constexpr int kTake = 256;   // announcements taken at once
constexpr int kBatch = 16;   // tasks advanced at once
}  // namespace

int LocalLoop::do_work() {
  ticket_ = context_.table.status(context_.local_rank).doorbell.ticket();
  if (has_news()) {
    // Somebody has left or the job has failed: every task has to look at itself.
    all_.clear();
    context_.tasks.rows(&all_);
    for (const RowIndex row : all_) enqueue(row);
  }
  RowIndex rows[kTake];
  const int taken = context_.table.take(rows, kTake);
  for (int i = 0; i < taken; ++i) enqueue(rows[i]);
  int done = taken;
  for (int i = 0; i < kBatch && !ready_.empty(); ++i, ++done) {
    std::pop_heap(ready_.begin(), ready_.end(), is_later);
    const RowIndex row = ready_.back().row;
    ready_.pop_back();
    // By row, not by pointer: one row may have been announced twice and be finished by now.
    if (PartTask* task = context_.tasks.held_by_loop(row); task != nullptr) (void)progress(context_, *task);
  }
  return done;
}

void LocalLoop::enqueue(RowIndex row) {
  const PartTask* task = context_.tasks.held_by_loop(row);
  if (task == nullptr) return;
  ready_.push_back({task->operation->priority, sequence_++, row});
  std::push_heap(ready_.begin(), ready_.end(), is_later);
}

bool LocalLoop::has_news() noexcept {
  std::uint32_t gone = context_.table.aborted() ? kMaxLocalRanks + 1 : 0;
  for (std::uint32_t rank = 0; rank < context_.local_size; ++rank) gone += context_.table.has_left(rank) ? 1 : 0;
  return std::exchange(seen_gone_, gone) != gone;
}

void LocalLoop::wait_for_work() noexcept {
  if (ready_.empty()) (void)context_.table.status(context_.local_rank).doorbell.wait(ticket_, -1, spin_us_);
}

void LocalLoop::wake() noexcept { context_.table.status(context_.local_rank).doorbell.ring(); }

}  // namespace commlib
