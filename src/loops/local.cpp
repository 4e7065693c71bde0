// SPDX-License-Identifier: Apache-2.0
#include "loops/local.hpp"

#include <algorithm>

namespace commlib {

void LocalAdmission::ask(RowIndex row, std::uint64_t round, std::uint64_t bytes, std::int32_t priority) noexcept {
  std::unique_lock lock(mutex_);
  waiting_.push_back({row, round, bytes, priority});
  grant_on(lock);
}

void LocalAdmission::give_back(std::uint64_t bytes) noexcept {
  std::unique_lock lock(mutex_);
  left_bytes_ += std::min(bytes, budget_bytes_);
  grant_on(lock);
}

void LocalAdmission::grant_on(std::unique_lock<std::mutex>& lock) noexcept {
  while (!waiting_.empty()) {
    const auto best = std::max_element(waiting_.begin(), waiting_.end(), [](const Waiting& a, const Waiting& b) {
      return a.priority < b.priority;  // the first of equals wins
    });
    const Waiting next = *best;
    const std::uint64_t charge = std::min(next.bytes, budget_bytes_);
    if (charge > left_bytes_) return;
    left_bytes_ -= charge;
    waiting_.erase(best);
    lock.unlock();
    table_.row(next.row).head().granted.store(next.round, std::memory_order_release);
    table_.announce_all(next.row);
    lock.lock();
  }
}

}  // namespace commlib
