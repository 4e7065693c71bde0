// SPDX-License-Identifier: Apache-2.0
// The loop that looks outwards: frames to and from other hosts, the summation server, and who still lives. Every process
// has one; only local roots and dedicated servers have a transport in it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/event_fd.hpp"
#include "base/fd.hpp"
#include "base/runner.hpp"
#include "loops/exchange.hpp"
#include "loops/watch.hpp"
#include "sched/egress.hpp"
#include "server/engine.hpp"
#include "transport/transport.hpp"

namespace commlib {

struct NetworkOptions {
  PeerId self = 0;
  std::vector<std::uint32_t> member_of_peer;  // who a lost connection is blamed on: a host's local root, or a server
  std::int64_t peer_timeout_ms = 30'000;
};

class NetworkLoop : public Loop, private FrameSink {
 public:
  // `watch` and `transport` may be null; with a transport there are `egress` and `engine`. Everything given outlives the loop.
  NetworkLoop(NetworkOptions options, ReadyTable& table, Watch* watch, LogBuffer* log);
  ~NetworkLoop() override;
  void attach(std::unique_ptr<Transport> transport, Egress& egress, ServerEngine& engine, Exchange* exchange);

  [[nodiscard]] int do_work() override;
  void wait_for_work() noexcept override;
  void wake() noexcept override { wake_.signal(); }

  // Any thread: leave in order. `wait_finished` returns when all that had to leave has left, after `timeout_ms`, or when
  // the job has failed.
  void finish() noexcept;
  void wait_finished(int timeout_ms) noexcept;
  // After the loop has ended, or in a forked child: close every descriptor.
  void close() noexcept;

  // Bytes of payload that this process has received and sent as an owner.
  [[nodiscard]] EngineCounters engine_counters() const noexcept;

 private:
  Errc on_header(PeerId peer, const Frame& frame, std::byte** into) noexcept override;
  Errc on_frame(PeerId peer, const Frame& frame) noexcept override;
  bool next_frame(PeerId peer, OutFrame* out) noexcept override { return egress_->next(peer, out); }
  void on_sent(PeerId peer, const OutFrame& out) noexcept override;
  void on_closed(PeerId peer, Errc code, int os_error) noexcept override;

  int deliver_own() noexcept;
  void leave() noexcept;
  void finish_transport() noexcept;
  int tick() noexcept;
  void look_at_epoch() noexcept;
  void give_up() noexcept;
  [[nodiscard]] PeerId peers() const noexcept { return static_cast<PeerId>(options_.member_of_peer.size()); }

  const NetworkOptions options_;
  ReadyTable& table_;
  Watch* watch_;
  LogBuffer* log_;
  std::unique_ptr<Transport> transport_;
  Egress* egress_ = nullptr;
  ServerEngine* engine_ = nullptr;
  Exchange* exchange_ = nullptr;
  EventFd wake_;
  Fd timer_;
  std::vector<pollfd> polled_;  // wake_, timer_, transport, then the watch's
  bool woken_ = false;          // the last poll saw it
  bool timer_rang_ = false;
  std::vector<bool> closed_;             // by peer
  std::vector<std::int64_t> silent_ms_;  // by peer: as far as we were awake ourselves
  bool leaving_ = false;                 // in order: all that has to be said before BYE has been said
  std::atomic<std::uint32_t> finishing_{0};
  std::atomic<std::uint32_t> finished_{0};  // futex word of wait_finished
  std::int64_t giving_up_since_ms_ = -1;    // ABORT has been queued
  bool given_up_ = false;
  std::int64_t last_tick_ms_ = 0;
};

}  // namespace commlib
