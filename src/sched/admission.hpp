// SPDX-License-Identifier: Apache-2.0
// A budget in bytes and those who wait for it, highest priority first, first come first served among equals.
//
// Strictly in that order: what does not fit blocks those behind it, else a large one could be overtaken for ever.
// Nobody can wait for ever as long as whatever has been admitted ends without a further admission. What is larger than
// the whole budget is admitted when nothing else is.
//
// Owned by one loop and used on its thread only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace commlib {

template <typename Waiter>
class Admission {
 public:
  explicit Admission(std::uint64_t budget_bytes) : budget_bytes_(budget_bytes) {}

  void add(Waiter* waiter, std::uint64_t bytes, std::int32_t priority) {
    heap_.push_back({priority, sequence_++, bytes, waiter});
    std::push_heap(heap_.begin(), heap_.end(), comes_later);
  }

  // The first in line if there is room for it, its bytes now taken; else nullptr. Call until nullptr.
  [[nodiscard]] Waiter* admit() noexcept {
    if (heap_.empty()) return nullptr;
    const std::uint64_t bytes = heap_.front().bytes;
    if (taken_bytes_ != 0 && (bytes > budget_bytes_ || taken_bytes_ > budget_bytes_ - bytes)) return nullptr;
    std::pop_heap(heap_.begin(), heap_.end(), comes_later);
    Waiter* const waiter = heap_.back().waiter;
    heap_.pop_back();
    taken_bytes_ += bytes;
    return waiter;
  }

  // Gives back what admit() took.
  void release(std::uint64_t bytes) noexcept { taken_bytes_ -= bytes; }

  // Forgets one that still waits. O(n): for failures only.
  void remove(const Waiter* waiter) noexcept {
    std::erase_if(heap_, [waiter](const Entry& entry) { return entry.waiter == waiter; });
    std::make_heap(heap_.begin(), heap_.end(), comes_later);
  }

  [[nodiscard]] std::uint64_t budget_bytes() const noexcept { return budget_bytes_; }
  [[nodiscard]] std::uint64_t taken_bytes() const noexcept { return taken_bytes_; }
  [[nodiscard]] std::size_t waiting() const noexcept { return heap_.size(); }

 private:
  struct Entry {
    std::int32_t priority;
    std::uint64_t sequence;
    std::uint64_t bytes;
    Waiter* waiter;
  };

  [[nodiscard]] static bool comes_later(const Entry& a, const Entry& b) noexcept {
    return a.priority != b.priority ? a.priority < b.priority : a.sequence > b.sequence;
  }

  std::uint64_t budget_bytes_;
  std::uint64_t taken_bytes_ = 0;
  std::uint64_t sequence_ = 0;
  std::vector<Entry> heap_;
};

}  // namespace commlib
