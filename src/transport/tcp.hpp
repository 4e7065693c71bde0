// SPDX-License-Identifier: Apache-2.0
// Frames over connected stream sockets: TCP between hosts, any other kind in tests. See transport.hpp for the contract.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "base/event_fd.hpp"
#include "base/fd.hpp"
#include "transport/stream.hpp"
#include "transport/transport.hpp"

namespace commlib {

struct TcpOptions {
  int peer_timeout_ms =
      30'000;  // how long sent bytes may stay unacknowledged (TCP_USER_TIMEOUT); 0: the kernel's limit
  std::uint32_t notsent_lowat_bytes = 128 * 1024;  // unsent bytes in the kernel beyond which no frame is taken
  std::uint32_t phase = 0;  // the peer that is served first, so that hosts do not all begin with one
};

class TcpTransport final : public Transport {
 public:
  // sockets[peer]: its streams, connected and authenticated; none for this node itself and for nodes it does not talk
  // to. Takes them, also when it throws Error. Nothing has to be allocated or opened after construction.
  TcpTransport(std::vector<std::vector<Fd>> sockets, const TcpOptions& options);
  ~TcpTransport() override;
  TcpTransport(const TcpTransport&) = delete;
  TcpTransport& operator=(const TcpTransport&) = delete;

  void attach(FrameSink* sink) noexcept override { sink_ = sink; }
  [[nodiscard]] int do_work() noexcept override;
  void notify(PeerId peer) noexcept override;
  [[nodiscard]] int descriptor() const noexcept override { return epoll_.get(); }
  void finish() noexcept override;
  [[nodiscard]] bool finished() const noexcept override;
  [[nodiscard]] std::int64_t silent_ms(PeerId peer) const noexcept override;
  [[nodiscard]] TransportCounters counters(PeerId peer) const noexcept override;
  void close() noexcept override;

 private:
  struct Peer {
    std::vector<Stream*> streams;
    std::size_t first_stream = 0;  // whose turn it is to be first
    bool wants = false;            // the sink may have a frame for it
    bool due = false;              // something can be done for it now
    bool gone = false;             // on_closed has been called, or there never was a stream
    std::int64_t received_ms = 0;
    TransportCounters counters;
  };

  [[nodiscard]] bool is_alive(const Peer& peer) const noexcept { return !closed_ && !peer.gone; }
  [[nodiscard]] bool can_send(const Peer& peer, const Stream& stream) const noexcept;
  [[nodiscard]] bool is_due(const Peer& peer) const noexcept;
  [[nodiscard]] bool is_over(const Peer& peer) const noexcept;
  void mark_if_due(Peer& peer) noexcept;
  void watch(int descriptor, std::uint32_t events, std::uint64_t tag);
  void collect_events() noexcept;
  void arm_retry() noexcept;
  int serve(PeerId id) noexcept;
  void settle(PeerId id, Stream& stream) noexcept;
  void release(Stream& stream) noexcept;
  void close_peer(PeerId id, Errc code, int os_error) noexcept;

  FrameSink* sink_ = nullptr;
  std::deque<Stream> streams_;  // never changes after construction, so that close() may walk it at any moment
  std::vector<Peer> peers_;
  Fd epoll_;
  EventFd kick_;  // ends a sleep on epoll_ for work that no socket reports
  Fd retry_;      // a timer: tries again after the kernel had no memory
  std::size_t due_peers_ = 0;
  std::size_t turn_;
  bool working_ = false;
  bool finishing_ = false;
  bool closed_ = false;
};

}  // namespace commlib
