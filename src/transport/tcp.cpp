// SPDX-License-Identifier: Apache-2.0
// Design notes
//
// Edge-triggered, and every socket is registered once for everything. Level-triggered sockets would need two epoll_ctl
// for each time a stream blocks, and with TCP_NOTSENT_LOWAT a stream with much to send blocks all the time. The price
// is that the flags of a Stream, not the epoll instance, say what is left to do. Therefore what no edge will announce
// kicks an eventfd: a notify from outside do_work, and work that is left over by a do_work that moved nothing. A
// do_work that moved something is called again anyway.
//
// A peer is `due` while one of its streams is readable, or can send and has, or may get, something to send. do_work
// serves the peers that are due in a circle, each stream for a bounded turn (see stream.cpp), until the batch is large
// enough; the next one starts behind the last peer served.
//
// A stream ends orderly after its BYE, or in any case once this side is finishing. A peer ends with the first stream
// that ends otherwise, or else when all of them have ended or said BYE. A finishing side says its own BYE first. Both
// sides then have read everything before they close, which matters, because closing a socket with unread data resets it
// and may destroy what the other side has not read yet.
#include "transport/tcp.hpp"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "base/clock.hpp"

namespace commlib {

namespace {

constexpr std::uint64_t kKickTag = ~std::uint64_t{0};
constexpr std::uint64_t kRetryTag = kKickTag - 1;
constexpr int kEventsAtOnce = 64;
constexpr long kRetryMs = 5;
constexpr std::uint64_t kBatchBytes = 4 * 1024 * 1024;  // about what one do_work moves at most

std::uint64_t moved_bytes(const TransportCounters& counters) noexcept {
  return counters.bytes_sent + counters.bytes_received;
}

}  // namespace

TcpTransport::TcpTransport(std::vector<std::vector<Fd>> sockets, const TcpOptions& options)
    : peers_(sockets.size()),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      retry_(::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)),
      turn_(sockets.empty() ? 0 : options.phase % sockets.size()) {
  if (!epoll_.is_valid() || !retry_.is_valid()) throw_os_error("epoll_create1 or timerfd_create", errno);
  watch(kick_.descriptor(), EPOLLIN, kKickTag);
  watch(retry_.get(), EPOLLIN, kRetryTag);
  for (PeerId id = 0; id < sockets.size(); ++id) {
    Peer& peer = peers_[id];
    peer.received_ms = now_ms();
    peer.gone = sockets[id].empty();
    for (Fd& socket : sockets[id]) {
      Stream& stream =
          streams_.emplace_back(id, std::move(socket), options.peer_timeout_ms, options.notsent_lowat_bytes);
      peer.streams.push_back(&stream);
      watch(stream.descriptor(), EPOLLIN | EPOLLOUT | EPOLLRDHUP, streams_.size() - 1);
    }
  }
}

TcpTransport::~TcpTransport() { close(); }

void TcpTransport::watch(int descriptor, std::uint32_t events, std::uint64_t tag) {
  epoll_event event{};
  event.events = events | EPOLLET;
  event.data.u64 = tag;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, descriptor, &event) != 0) throw_os_error("epoll_ctl", errno);
}

bool TcpTransport::can_send(const Peer& peer, const Stream& stream) const noexcept {
  return stream.is_writable() && (stream.has_unsent() || (stream.takes_frames() && (peer.wants || finishing_)));
}

bool TcpTransport::is_due(const Peer& peer) const noexcept {
  return std::any_of(peer.streams.begin(), peer.streams.end(),
                     [&](const Stream* stream) { return stream->is_readable() || can_send(peer, *stream); });
}

// Nothing can come any more, and, if this side is finishing, nothing is left to say.
bool TcpTransport::is_over(const Peer& peer) const noexcept {
  return std::all_of(peer.streams.begin(), peer.streams.end(), [&](const Stream* stream) {
    return !stream->is_open() || (stream->is_bye_received() && (!finishing_ || stream->is_bye_sent()));
  });
}

void TcpTransport::mark_if_due(Peer& peer) noexcept {
  if (peer.due || !is_alive(peer) || !is_due(peer)) return;
  peer.due = true;
  ++due_peers_;
}

void TcpTransport::notify(PeerId id) noexcept {
  if (id >= peers_.size() || !is_alive(peers_[id])) return;
  Peer& peer = peers_[id];
  peer.wants = true;
  if (working_) return;  // do_work looks at it again before it returns
  const std::size_t before = due_peers_;
  mark_if_due(peer);
  if (before == 0 && due_peers_ > 0) kick_.signal();
}

void TcpTransport::finish() noexcept {
  if (finishing_ || closed_) return;
  finishing_ = true;
  kick_.signal();  // do_work looks at all peers when it is kicked
}

bool TcpTransport::finished() const noexcept {
  return finishing_ && std::none_of(peers_.begin(), peers_.end(), [this](const Peer& peer) { return is_alive(peer); });
}

std::int64_t TcpTransport::silent_ms(PeerId id) const noexcept {
  return id < peers_.size() && !peers_[id].streams.empty() ? now_ms() - peers_[id].received_ms : 0;
}

TransportCounters TcpTransport::counters(PeerId id) const noexcept {
  return id < peers_.size() ? peers_[id].counters : TransportCounters{};
}

int TcpTransport::do_work() noexcept {
  if (closed_ || sink_ == nullptr) return 0;
  working_ = true;
  collect_events();
  int moved = 0;
  bool served = false;
  std::uint64_t bytes = 0;
  const std::size_t start = turn_;
  for (std::size_t i = 0; i < peers_.size() && due_peers_ > 0 && bytes < kBatchBytes && !closed_; ++i) {
    const auto id = static_cast<PeerId>((start + i) % peers_.size());
    Peer& peer = peers_[id];
    if (!peer.due) continue;
    turn_ = (id + 1) % peers_.size();
    const std::uint64_t before = moved_bytes(peer.counters);
    moved += serve(id);
    bytes += moved_bytes(peer.counters) - before;
    served = true;
  }
  working_ = false;
  if (!served || closed_) return moved;
  for (Peer& peer : peers_) mark_if_due(peer);  // what a turn has left over, and whom callbacks have notified
  if (due_peers_ > 0 && moved == 0) kick_.signal();
  return moved;
}

void TcpTransport::collect_events() noexcept {
  std::array<epoll_event, kEventsAtOnce> events;
  const int count = ::epoll_wait(epoll_.get(), events.data(), kEventsAtOnce, 0);  // those beyond keep it readable
  for (int i = 0; i < count; ++i) {
    const epoll_event& event = events[static_cast<std::size_t>(i)];
    if (event.data.u64 == kKickTag) {
      // Never drained: every signal is an edge of its own.
    } else if (event.data.u64 == kRetryTag) {
      for (Stream& stream : streams_)
        if (stream.is_stalled()) stream.try_again();
    } else {
      streams_[event.data.u64].on_events(event.events);
    }
  }
  if (count > 0)
    for (Peer& peer : peers_) mark_if_due(peer);
}

// One turn of one peer: first what has come in, because the answers to it may leave in the same turn.
int TcpTransport::serve(PeerId id) noexcept {
  Peer& peer = peers_[id];
  const std::size_t count = peer.streams.size();
  const std::size_t first = peer.first_stream;
  peer.first_stream = (first + 1) % count;
  peer.due = false;
  --due_peers_;
  int received = 0;
  for (std::size_t i = 0; i < count && is_alive(peer); ++i) {
    Stream& stream = *peer.streams[(first + i) % count];
    received += stream.receive(*sink_, peer.counters);
    settle(id, stream);
  }
  if (received > 0) peer.received_ms = now_ms();
  int sent = 0;
  for (std::size_t i = 0; i < count && is_alive(peer); ++i) {
    Stream& stream = *peer.streams[(first + i) % count];
    if (can_send(peer, stream)) sent += stream.send(*sink_, peer.counters, &peer.wants, finishing_);
    settle(id, stream);
  }
  if (is_alive(peer) && is_over(peer)) close_peer(id, Errc::kOk, 0);
  return received + sent;
}

// Draws the conclusions from what has become of a stream.
void TcpTransport::settle(PeerId id, Stream& stream) noexcept {
  if (closed_) return;
  if (stream.is_stalled()) arm_retry();
  if (stream.state() == Stream::State::kMalformed) {
    close_peer(id, Errc::kInternal, 0);
  } else if (stream.state() == Stream::State::kEnded && stream.descriptor() >= 0) {
    const int error = stream.os_error();
    const bool hung_up = error == 0 || error == ECONNRESET || error == EPIPE;
    if (stream.is_bye_received() || (finishing_ && hung_up)) {
      release(stream);
    } else {
      close_peer(id, Errc::kPeerLost, error);
    }
  }
}

void TcpTransport::arm_retry() noexcept {
  itimerspec once{};
  once.it_value.tv_nsec = kRetryMs * 1'000'000;
  ::timerfd_settime(retry_.get(), 0, &once, nullptr);
}

// A child that was forked may still hold the socket: so it is taken off the epoll instance and shut down by name,
// because closing it would do neither.
void TcpTransport::release(Stream& stream) noexcept {
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, stream.descriptor(), nullptr);
  ::shutdown(stream.descriptor(), SHUT_RDWR);
  stream.close();
}

void TcpTransport::close_peer(PeerId id, Errc code, int os_error) noexcept {
  Peer& peer = peers_[id];
  peer.gone = true;
  for (Stream* stream : peer.streams)
    if (stream->descriptor() >= 0) release(*stream);
  sink_->on_closed(id, code, os_error);
}

void TcpTransport::close() noexcept {
  closed_ = true;
  for (Stream& stream : streams_) stream.close();
  kick_.close();
  retry_.reset();
  epoll_.reset();
}

}  // namespace commlib
