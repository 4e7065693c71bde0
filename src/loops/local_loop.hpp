// SPDX-License-Identifier: Apache-2.0
// Carries out what this process has submitted asynchronously, and helps with the slices of rows that others wait for.
#pragma once

#include <vector>

#include "base/runner.hpp"
#include "loops/local.hpp"

namespace commlib {

class LocalLoop : public Loop {
 public:
  // Sleeps in `context.table`'s doorbell of the own rank, after spinning for `spin_us`. `outward` is woken when the job fails.
  LocalLoop(LocalContext& context, Loop& outward, int spin_us);

  [[nodiscard]] int do_work() override;
  void wait_for_work() noexcept override;
  void wake() noexcept override;

 private:
  struct Ready {
    std::int32_t priority;
    std::uint64_t sequence;
    RowIndex row;
  };
  static bool is_later(const Ready& a, const Ready& b) noexcept {
    return a.priority != b.priority ? a.priority < b.priority : a.sequence > b.sequence;
  }
  void enqueue(RowIndex row);
  [[nodiscard]] bool has_news() noexcept;
  void probe() noexcept;

  LocalContext& context_;
  Loop& outward_;
  const int spin_us_;
  std::uint32_t ticket_ = 0;
  std::uint64_t sequence_ = 0;
  std::uint32_t seen_gone_ = 0;  // ranks that had left, and the epoch, when all tasks were last looked at
  std::vector<Ready> ready_;     // a heap: highest priority first, then the order of announcement
  std::vector<RowIndex> all_;
  std::vector<std::uint32_t> unprobed_;  // local ranks whose memory we have not yet tried to read
};

}  // namespace commlib
