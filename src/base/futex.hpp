// SPDX-License-Identifier: Apache-2.0
// Sleeping on a word that may lie in memory shared by several processes.
#pragma once

#include <atomic>
#include <climits>
#include <cstdint>

namespace commlib {

static_assert(std::atomic<std::uint32_t>::is_always_lock_free && sizeof(std::atomic<std::uint32_t>) == 4);

// Sleeps while `word` is `expected`. Returns on a wake, a change, a signal, after `timeout_ms` (−1: never), or for no
// reason: the caller looks again.
void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected, int timeout_ms) noexcept;

// Wakes at most `sleepers` of those who sleep on `word`, in any process.
void futex_wake(const std::atomic<std::uint32_t>& word, int sleepers = INT_MAX) noexcept;

// Something to ring when there is work, for any number of sleepers. Lives in private or shared memory; all zero is a
// valid one. A sleeper takes a ticket, looks for work, and if there is none waits with that ticket: a ring since then
// ends the wait at once.
struct alignas(64) Doorbell {
  std::atomic<std::uint32_t> rings{0};
  std::atomic<std::uint32_t> sleepers{0};

  // All that was written before a ring is visible to who sees the ring. A system call only when somebody sleeps.
  void ring() noexcept;

  [[nodiscard]] std::uint32_t ticket() const noexcept;

  // Spins for at most `spin_us`, then sleeps, until rung since `ticket` or for `timeout_ms` (−1: for ever). May end
  // early. True if it was rung.
  bool wait(std::uint32_t ticket, int timeout_ms, int spin_us = 0) noexcept;
};
static_assert(sizeof(Doorbell) == 64);

}  // namespace commlib
