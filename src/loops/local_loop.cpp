// SPDX-License-Identifier: Apache-2.0
#include "loops/local_loop.hpp"

#include <algorithm>

#include "loops/plan.hpp"
#include "memory/remote.hpp"

namespace commlib {

namespace {
constexpr int kTake = 256;  // announcements taken at once
constexpr int kBatch = 16;  // tasks advanced at once
}  // namespace

LocalLoop::LocalLoop(LocalContext& context, Loop& outward, int spin_us)
    : context_(context), outward_(outward), spin_us_(spin_us) {
  for (std::uint32_t rank = 0; rank < context_.local_size; ++rank) {
    if (rank != context_.local_rank) unprobed_.push_back(rank);
  }
}

// Whether the kernel lets this process read that one is found out by trying; a rank learns from the count of those who
// could whether its ordinary buffers may be read where they lie.
void LocalLoop::probe() noexcept {
  std::erase_if(unprobed_, [this](std::uint32_t rank) {
    RankStatus& status = context_.table.status(rank);
    const std::uint64_t address = status.probe.load(std::memory_order_acquire);
    if (address == 0) return false;  // not there yet; it will ring
    std::uint64_t value = 0;
    if (remote_read(context_.pids[rank], &value, address, sizeof value) == Errc::kOk && value == kProbeValue) {
      status.reachable_by.fetch_add(1, std::memory_order_relaxed);
    }
    return true;
  });
}

int LocalLoop::do_work() {
  ticket_ = context_.table.status(context_.local_rank).doorbell.ticket();
  if (has_news()) {
    if (context_.table.aborted()) outward_.wake();
    // Somebody has left or the job has failed: every task has to look at itself.
    all_.clear();
    context_.tasks.rows(&all_);
    for (const RowIndex row : all_) enqueue(row);
  }
  if (!unprobed_.empty()) probe();
  RowIndex rows[kTake];
  const int taken = context_.table.take(rows, kTake);
  for (int i = 0; i < taken; ++i) enqueue(rows[i]);
  int done = taken;
  for (int i = 0; i < kBatch && !ready_.empty(); ++i, ++done) {
    std::pop_heap(ready_.begin(), ready_.end(), is_later);
    const RowIndex row = ready_.back().row;
    ready_.pop_back();
    // By row, not by pointer: one row may have been announced twice and be finished by now.
    PartTask* const task = context_.tasks.held_by_loop(row);
    if (task == nullptr) continue;
    // What nobody held is from here on told to this loop; see ReadyTable::announce.
    std::atomic<std::uint32_t>& caller = task->row.entry(context_.local_rank).caller;
    if (caller.load(std::memory_order_relaxed) == kLooksLater) caller.exchange(0, std::memory_order_seq_cst);
    (void)progress(context_, *task);
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
