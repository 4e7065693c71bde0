// SPDX-License-Identifier: Apache-2.0
#include "loops/watch.hpp"

#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "base/clock.hpp"

namespace commlib {

Watch::Watch(Options options, ReadyTable& table, LogBuffer* log)
    : table_(table),
      log_(log),
      local_rank_(options.local_rank),
      global_ranks_(std::move(options.global_ranks)),
      peer_timeout_ms_(options.peer_timeout_ms),
      last_look_ms_(now_ms()) {
  for (std::uint32_t rank = 0; rank < global_ranks_.size(); ++rank) {
    if (rank == local_rank_) continue;
    Neighbour& neighbour = neighbours_.emplace_back();
    neighbour.local_rank = rank;
    if (rank < options.pids.size() && options.pids[rank] > 0) {
      // Close-on-exec by itself. It may fail: the process is not visible from here, or gone; the socket and the beats remain.
      neighbour.process = Fd(static_cast<int>(::syscall(SYS_pidfd_open, options.pids[rank], 0)));
    }
    if (rank < options.sockets.size() && options.sockets[rank] >= 0) neighbour.socket = Fd(options.sockets[rank]);
  }
}

void Watch::add_descriptors(std::vector<pollfd>* out) const {
  for (const Neighbour& neighbour : neighbours_) {
    // poll passes over negative descriptors.
    out->push_back({neighbour.gone ? -1 : neighbour.process.get(), POLLIN, 0});
    out->push_back({neighbour.gone ? -1 : neighbour.socket.get(), POLLIN, 0});
  }
}

int Watch::check(const pollfd* polled) noexcept {
  int lost_count = 0;
  for (Neighbour& neighbour : neighbours_) {
    const pollfd& process = *polled++;
    const pollfd& socket = *polled++;
    if (neighbour.gone) continue;
    const bool has_died = process.revents != 0;
    bool has_closed = false;
    if (socket.revents != 0) {
      char byte = 0;  // nobody sends here after the set-up: end of file, or noise of no meaning
      const auto got = ::recv(neighbour.socket.get(), &byte, 1, MSG_DONTWAIT);
      has_closed = got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
    }
    if (!has_died && !has_closed) continue;
    lost(neighbour, has_died ? Cause::kDied : Cause::kClosed);
    ++lost_count;
  }
  return lost_count;
}

void Watch::lost(Neighbour& neighbour, Cause cause) noexcept {
  neighbour.gone = true;
  if (table_.has_left(neighbour.local_rank)) return;  // it said good-bye
  const std::uint32_t rank = global_ranks_[neighbour.local_rank];
  if (table_.abort(rank, cause)) COMMLIB_LOG(log_, LogLevel::kError, "rank %u of this host is lost", rank);
}

void Watch::beat(std::int64_t now) noexcept {
  table_.status(local_rank_).beat_ms.store(static_cast<std::uint64_t>(now), std::memory_order_relaxed);
  // However long ago the last look was, it counts as one beat: who has been stopped himself (Ctrl-Z, a machine that
  // slept) must not take the others' silence for death.
  const std::int64_t passed_ms = std::min(now - last_look_ms_, kBeatMs);
  last_look_ms_ = now;
  for (Neighbour& neighbour : neighbours_) {
    const std::uint64_t beat = table_.status(neighbour.local_rank).beat_ms.load(std::memory_order_relaxed);
    neighbour.silent_ms = beat != neighbour.last_beat ? 0 : neighbour.silent_ms + passed_ms;
    neighbour.last_beat = beat;
    if (!neighbour.gone && neighbour.silent_ms > peer_timeout_ms_) lost(neighbour, Cause::kSilent);
  }
}

void Watch::close() noexcept {
  for (Neighbour& neighbour : neighbours_) {
    neighbour.process.reset();
    neighbour.socket.reset();
  }
}

}  // namespace commlib
