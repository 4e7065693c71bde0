// SPDX-License-Identifier: Apache-2.0
//
// Design notes. A ring must never be missed: either the sleeper sees the new count of rings, or the ringer sees that
// there is a sleeper. The ringer writes `rings` and then reads `sleepers`; the sleeper writes `sleepers` and then reads
// `rings`. All four are sequentially consistent, so not both reads can miss. When the ringer does see a sleeper that
// has not gone to sleep yet, the kernel compares `rings` once more under its own lock and sends it back.
//
// A process that is killed in its sleep leaves `sleepers` too high for ever. That costs later rings a system call, no
// more. `rings` wraps: a sleeper would have to miss exactly 2^32 rings between its ticket and its wait.
#include "base/futex.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ctime>

#include "base/spin.hpp"

namespace commlib {

void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected, int timeout_ms) noexcept {
  const timespec timeout{timeout_ms / 1000, timeout_ms % 1000 * 1'000'000L};
  // Not FUTEX_PRIVATE: the word may be mapped at another address by the one who wakes.
  ::syscall(SYS_futex, &word, FUTEX_WAIT, expected, timeout_ms < 0 ? nullptr : &timeout, nullptr, 0);
}

void futex_wake(const std::atomic<std::uint32_t>& word, int sleepers) noexcept {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, sleepers, nullptr, nullptr, 0);
}

void Doorbell::ring() noexcept {
  rings.fetch_add(1, std::memory_order_seq_cst);  // also releases what the ring announces
  if (sleepers.load(std::memory_order_seq_cst) != 0) futex_wake(rings);
}

std::uint32_t Doorbell::ticket() const noexcept {
  return rings.load(std::memory_order_acquire);  // acquire: what came before the rings it counts is visible
}

bool Doorbell::wait(std::uint32_t ticket, int timeout_ms, int spin_us) noexcept {
  if (rings.load(std::memory_order_acquire) != ticket) return true;
  if (spin_until(spin_us, [&] { return rings.load(std::memory_order_acquire) != ticket; })) return true;
  if (timeout_ms == 0) return false;
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  if (rings.load(std::memory_order_seq_cst) == ticket) futex_wait(rings, ticket, timeout_ms);
  sleepers.fetch_sub(1, std::memory_order_relaxed);  // nobody reads anything on the strength of it
  return rings.load(std::memory_order_acquire) != ticket;
}

}  // namespace commlib
