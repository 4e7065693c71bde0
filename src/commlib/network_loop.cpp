// SPDX-License-Identifier: Apache-2.0
//
// Design notes
//
// When the job fails, whoever finds out first writes the epoch word of its host. Every network loop that sees it queues
// ABORT to every peer, gives that a moment to leave, then closes the transport and lets the exchange fail what it holds.
// Only then is no memory of the user's referred to any more, and only then do its operations complete.
//
// Who leaves in order may do so because another has left, and it could not go on. It says so with LEFT before BYE, so that
// what fails elsewhere for want of either names the one with whom it began, in whatever order the two are heard.
#include "commlib/network_loop.hpp"

#include <sys/timerfd.h>

#include <algorithm>
#include <cerrno>

#include "base/clock.hpp"
#include "base/futex.hpp"
#include "sched/wire.hpp"

namespace commlib {

namespace {
constexpr std::int64_t kAbortMs = 1'000;  // how long ABORT may take to leave
}  // namespace

NetworkLoop::NetworkLoop(NetworkOptions options, ReadyTable& table, Watch* watch, LogBuffer* log)
    : options_(std::move(options)),
      table_(table),
      watch_(watch),
      log_(log),
      timer_(::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)),
      closed_(options_.member_of_peer.size()),
      silent_ms_(options_.member_of_peer.size()),
      last_tick_ms_(now_ms()) {
  if (!timer_.is_valid()) throw_os_error("timerfd_create", errno);
  const itimerspec every{{kBeatMs / 1000, 0}, {kBeatMs / 1000, 0}};
  if (::timerfd_settime(timer_.get(), 0, &every, nullptr) != 0) throw_os_error("timerfd_settime", errno);
  polled_.push_back({wake_.descriptor(), POLLIN, 0});
  polled_.push_back({timer_.get(), POLLIN, 0});
  polled_.push_back({-1, POLLIN, 0});
  if (watch_ != nullptr) watch_->beat(last_tick_ms_);
}

NetworkLoop::~NetworkLoop() { close(); }

void NetworkLoop::attach(std::unique_ptr<Transport> transport, Egress& egress, ServerEngine& engine,
                         Exchange* exchange) {
  transport_ = std::move(transport);
  egress_ = &egress;
  engine_ = &engine;
  exchange_ = exchange;
  polled_[2].fd = transport_->descriptor();
  egress.set_notify([this](PeerId peer) {
    if (peer != options_.self) transport_->notify(peer);
  });
  transport_->attach(this);
}

int NetworkLoop::do_work() {
  if (std::exchange(woken_, false)) (void)wake_.drain();  // before looking: what comes later ends the next sleep
  int done = tick();
  if (transport_ != nullptr && !given_up_) {
    if (exchange_ != nullptr) done += exchange_->take_messages();
    done += transport_->do_work();
    done += deliver_own();
    // Nothing can be said after BYE, so ABORT goes first.
    if (finishing_.load(std::memory_order_acquire) != 0 && !table_.aborted()) leave();
    if (transport_->finished() && finished_.exchange(1, std::memory_order_acq_rel) == 0)
      futex_wake(finished_, INT32_MAX);
  } else if (exchange_ != nullptr) {
    exchange_->fail_all({Errc::kPeerLost, table_.aborted_member()});
  }
  look_at_epoch();
  return done;
}

void NetworkLoop::leave() noexcept {
  const std::uint32_t first = table_.first_leaver();
  const bool is_first_time = !std::exchange(leaving_, true);
  for (PeerId peer = 0; is_first_time && first != Failure::kNobody && peer < peers(); ++peer) {
    if (peer == options_.self || closed_[peer]) continue;
    OutFrame left;
    left.frame.kind = FrameKind::kLeft;
    left.frame.member = first;
    egress_->push(peer, left, 0);
  }
  finish_transport();
}

void NetworkLoop::finish_transport() noexcept {
  egress_->stop_holding();  // or BYE would follow an empty answer of a queue that is not
  transport_->finish();
}

// Frames from this node to itself: between the engine and the exchange, and from either to the other.
int NetworkLoop::deliver_own() noexcept {
  OutFrame out;
  int done = 0;
  for (; egress_->next(options_.self, &out); ++done) {
    if (out.frame.kind == FrameKind::kLeft) {
      engine_->on_peer_left(options_.self, out.frame.member);
    } else if (is_for_owner(out.frame.kind)) {
      if (engine_->on_local(out) != Errc::kOk) table_.abort(options_.member_of_peer[options_.self], Cause::kInternal);
    } else {
      exchange_->on_local(out);
      engine_->on_sent(options_.self, out);
    }
    egress_->sent(options_.self, out);
  }
  return done;
}

Errc NetworkLoop::on_header(PeerId peer, const Frame& frame, std::byte** into) noexcept {
  if (is_for_owner(frame.kind)) return engine_->on_header(peer, frame, into);
  if (is_from_owner(frame.kind) && exchange_ != nullptr) return exchange_->on_header(peer, frame, into);
  return Errc::kInternal;
}

Errc NetworkLoop::on_frame(PeerId peer, const Frame& frame) noexcept {
  if (is_for_owner(frame.kind)) return engine_->on_frame(peer, frame);
  if (frame.kind == FrameKind::kFail && frame.code == static_cast<std::uint8_t>(Errc::kPeerLost))
    table_.note_leaver(frame.member);
  if (is_from_owner(frame.kind)) return exchange_ != nullptr ? exchange_->on_frame(peer, frame) : Errc::kInternal;
  switch (frame.kind) {
    case FrameKind::kBeat:
      return Errc::kOk;
    case FrameKind::kLeft:
      table_.note_leaver(frame.member);
      engine_->on_peer_left(peer, table_.first_leaver());
      return Errc::kOk;
    case FrameKind::kAbort:
      if (frame.code > static_cast<std::uint8_t>(Cause::kUnreadable)) return Errc::kInternal;
      table_.abort(frame.member, static_cast<Cause>(frame.code));
      return Errc::kOk;
    default:
      return Errc::kInternal;
  }
}

void NetworkLoop::on_sent(PeerId peer, const OutFrame& out) noexcept {
  egress_->sent(peer, out);
  if (is_from_owner(out.frame.kind)) {
    engine_->on_sent(peer, out);
  } else if (is_for_owner(out.frame.kind) && exchange_ != nullptr) {
    exchange_->on_sent(peer, out);
  }
}

void NetworkLoop::on_closed(PeerId peer, Errc code, int os_error) noexcept {
  closed_[peer] = true;
  egress_->discard(peer);
  const std::uint32_t member = options_.member_of_peer[peer];
  if (finishing_.load(std::memory_order_acquire) != 0 || table_.aborted()) {
    // A peer closes because we leave: it owes us nothing, and what is in flight here ends with our own shutdown, or has failed.
  } else if (code == Errc::kOk) {
    table_.note_leaver(member);
    engine_->on_peer_left(peer, table_.first_leaver());
    if (exchange_ != nullptr) exchange_->on_peer_left(peer, table_.first_leaver());
  } else if (os_error == EFAULT) {
    table_.abort(options_.member_of_peer[options_.self],
                 Cause::kUnreadable);  // the connection is good, a buffer here is not
  } else {
    const Cause cause = code == Errc::kInternal ? Cause::kMalformed
                        : os_error == 0         ? Cause::kClosed
                        : os_error == ETIMEDOUT ? Cause::kSilent
                                                : Cause::kReset;
    if (table_.abort(member, cause)) {
      COMMLIB_LOG(log_, LogLevel::kError, "the connection to node %u is lost (errno %d)", peer, os_error);
    }
  }
  engine_->on_peer_closed(peer);
}

int NetworkLoop::tick() noexcept {
  const std::int64_t now = now_ms();  // costs no system call
  if (!std::exchange(timer_rang_, false) && now - last_tick_ms_ < kBeatMs) return 0;
  std::uint64_t expirations = 0;
  (void)!::read(timer_.get(), &expirations, sizeof expirations);
  const std::int64_t passed_ms = std::min(now - last_tick_ms_, kBeatMs);  // as in Watch::beat
  last_tick_ms_ = now;
  if (watch_ != nullptr) watch_->beat(now);
  if (transport_ == nullptr || given_up_) return 0;
  for (PeerId peer = 0; peer < peers(); ++peer) {
    if (peer == options_.self || closed_[peer]) continue;
    // Whatever else is queued is as good as a beat.
    if (!egress_->has(peer)) {
      OutFrame beat;
      beat.frame.kind = FrameKind::kBeat;
      egress_->push(peer, beat, 0);
    }
    silent_ms_[peer] = std::min(silent_ms_[peer] + passed_ms, transport_->silent_ms(peer));
    if (silent_ms_[peer] > options_.peer_timeout_ms) {
      table_.abort(options_.member_of_peer[peer], Cause::kSilent);
    }
  }
  return 0;
}

void NetworkLoop::look_at_epoch() noexcept {
  if (!table_.aborted() || given_up_) return;
  const std::int64_t now = now_ms();
  if (giving_up_since_ms_ < 0) {
    giving_up_since_ms_ = now;
    for (PeerId peer = 0; transport_ != nullptr && peer < peers(); ++peer) {
      if (peer == options_.self || closed_[peer]) continue;
      OutFrame out;
      out.frame.kind = FrameKind::kAbort;
      out.frame.hash = 1;
      out.frame.member = table_.aborted_member();
      out.frame.code = static_cast<std::uint8_t>(table_.aborted_cause());
      egress_->push(peer, out, 0);
    }
    // In order, so that the ABORT is read: closing a socket that has unread data resets it, and the peer would blame us.
    if (transport_ != nullptr) {
      finish_transport();
      (void)transport_->do_work();
    }
  }
  if (transport_ == nullptr || transport_->finished() || now - giving_up_since_ms_ > kAbortMs) give_up();
}

void NetworkLoop::give_up() noexcept {
  given_up_ = true;
  if (transport_ != nullptr) {
    transport_->close();
    polled_[2].fd = -1;
    for (PeerId peer = 0; peer < peers(); ++peer) {
      if (peer == options_.self || closed_[peer]) continue;
      closed_[peer] = true;
      egress_->discard(peer);
      engine_->on_peer_closed(peer);
    }
  }
  if (exchange_ != nullptr) exchange_->fail_all({Errc::kPeerLost, table_.aborted_member()});
  finished_.store(1, std::memory_order_release);
  futex_wake(finished_, INT32_MAX);
}

void NetworkLoop::wait_for_work() noexcept {
  polled_.resize(3);
  if (watch_ != nullptr) watch_->add_descriptors(&polled_);
  // While ABORT is on its way, look again soon: what it waits for may never come.
  const int timeout_ms = giving_up_since_ms_ >= 0 && !given_up_ ? 20 : -1;
  const int ready = ::poll(polled_.data(), polled_.size(), timeout_ms);
  if (ready <= 0) return;
  woken_ = polled_[0].revents != 0;
  timer_rang_ = polled_[1].revents != 0;
  if (watch_ != nullptr) (void)watch_->check(polled_.data() + 3);
}

void NetworkLoop::finish() noexcept {
  finishing_.store(1, std::memory_order_release);
  wake();
}

void NetworkLoop::wait_finished(int timeout_ms) noexcept {
  const std::int64_t deadline = now_ms() + timeout_ms;
  while (finished_.load(std::memory_order_acquire) == 0) {
    const std::int64_t left = deadline - now_ms();
    if (left <= 0) return;
    futex_wait(finished_, 0, static_cast<int>(left));
  }
}

void NetworkLoop::close() noexcept {
  if (transport_ != nullptr) transport_->close();
  if (watch_ != nullptr) watch_->close();
}

EngineCounters NetworkLoop::engine_counters() const noexcept {
  return engine_ != nullptr ? engine_->counters() : EngineCounters{};
}

}  // namespace commlib
