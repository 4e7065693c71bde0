// SPDX-License-Identifier: Apache-2.0
// Do the other ranks of this host live? A pidfd and a socket for each say at once when one has died; beats in the ready
// table say when one has stopped. Owned by the network loop and used on its thread.
#pragma once

#include <poll.h>

#include <cstdint>
#include <vector>

#include "base/fd.hpp"
#include "base/log.hpp"
#include "sched/ready_table.hpp"

namespace commlib {

inline constexpr std::int64_t kBeatMs = 1'000;

class Watch {
 public:
  struct Options {
    std::uint32_t local_rank = 0;
    std::vector<int> pids;                    // by local rank; 0 where unknown
    std::vector<int> sockets;                 // by local rank, taken; −1 where there is none
    std::vector<std::uint32_t> global_ranks;  // by local rank
    std::int64_t peer_timeout_ms = 30'000;
  };
  Watch(Options options, ReadyTable& table, LogBuffer* log);

  // Descriptors to poll; `check` is given their revents, in the same order, and says how many told of a death.
  void add_descriptors(std::vector<pollfd>* out) const;
  int check(const pollfd* polled) noexcept;
  // Every second: beat, and look at the beats of others.
  void beat(std::int64_t now_ms) noexcept;
  void close() noexcept;  // also in a forked child

 private:
  struct Neighbour {
    std::uint32_t local_rank = 0;
    Fd process;
    Fd socket;
    std::uint64_t last_beat = 0;
    std::int64_t silent_ms = 0;  // since `last_beat`, as far as we were awake ourselves
    bool gone = false;
  };
  void lost(Neighbour& neighbour, Cause cause) noexcept;

  ReadyTable& table_;
  LogBuffer* log_;
  std::uint32_t local_rank_;
  std::vector<std::uint32_t> global_ranks_;
  std::int64_t peer_timeout_ms_;
  std::int64_t last_look_ms_ = 0;
  std::vector<Neighbour> neighbours_;
};

}  // namespace commlib
