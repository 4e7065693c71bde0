// SPDX-License-Identifier: Apache-2.0
// Design notes
//
// Readiness. The sockets are watched edge-triggered, so a flag that says "readable" or "writable" stays up until a
// system call has shown the contrary: EAGAIN, or fewer bytes than were asked for. The latter saves the call that would
// only fetch an EAGAIN. It is not trusted for reading once a hang-up has been reported, because the end of file makes
// no edge of its own when it was reported together with data.
//
// Sending. Only a batch that is not large (kBatchBytes) is taken from the sink before its bytes are out, and the kernel
// takes no more than TCP_NOTSENT_LOWAT of unsent bytes. Both bound what a late urgent frame has to wait for.
//
// Losing. A send that fails does not end the stream: what the other side had sent before, its BYE above all, may still
// be unread. The failure is remembered and told when nothing is left to read.
#include "transport/stream.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

namespace commlib {

namespace {

constexpr std::size_t kHeaderBytes = sizeof(Frame);
constexpr std::size_t kBatchBytes = 64 * 1024;  // a batch that has this many is full
constexpr std::size_t kTurnBytes = 256 * 1024;  // about what one call of receive or send moves, for fairness

std::size_t wire_bytes(const Frame& frame) noexcept { return kHeaderBytes + frame.payload_bytes; }

bool is_shortage(int os_error) noexcept { return os_error == ENOBUFS || os_error == ENOMEM; }

// The two ends of a frame as they lie in memory, without the first `skip` bytes. Returns how many parts are not empty.
std::size_t add_parts(const OutFrame& out, std::size_t skip, iovec* parts) noexcept {
  std::size_t used = 0;
  if (skip < kHeaderBytes) {
    auto* const header = reinterpret_cast<const std::byte*>(&out.frame);
    parts[used++] = {const_cast<std::byte*>(header + skip), kHeaderBytes - skip};
  }
  const std::size_t payload_skip = skip < kHeaderBytes ? 0 : skip - kHeaderBytes;
  if (payload_skip < out.frame.payload_bytes)
    parts[used++] = {const_cast<std::byte*>(out.payload + payload_skip), out.frame.payload_bytes - payload_skip};
  return used;
}

}  // namespace

Stream::Stream(PeerId peer, Fd socket, int peer_timeout_ms, std::uint32_t notsent_lowat_bytes)
    : socket_(std::move(socket)), peer_(peer) {
  const int fd = socket_.get();
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 || ::fcntl(fd, F_SETFD, FD_CLOEXEC) < 0)
    throw_os_error("socket of peer " + std::to_string(peer), errno);
  // Failures are not looked at: other stream sockets know none of these, and none of them is needed for correctness.
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ::setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &notsent_lowat_bytes, sizeof notsent_lowat_bytes);
  ::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &peer_timeout_ms, sizeof peer_timeout_ms);
}

void Stream::on_events(std::uint32_t events) noexcept {
  const bool over = (events & (EPOLLERR | EPOLLHUP | EPOLLRDHUP)) != 0;
  hangup_ = hangup_ || over;
  readable_ = readable_ || over || (events & EPOLLIN) != 0;
  // After a failed send there is nothing to hope for.
  writable_ = send_error_ == 0 && (writable_ || (events & EPOLLOUT) != 0);
}

void Stream::try_again() noexcept {
  stalled_ = false;
  readable_ = true;
  writable_ = send_error_ == 0;
}

int Stream::receive(FrameSink& sink, TransportCounters& counters) noexcept {
  int moved = 0;
  std::size_t turn = 0;
  while (is_readable() && turn < kTurnBytes) {
    // Into its place what belongs to the payload, into `ahead_` what comes behind it.
    const iovec parts[2] = {{into_, payload_left_}, {ahead_.data() + ahead_bytes_, ahead_.size() - ahead_bytes_}};
    const ssize_t got = payload_left_ > 0 ? ::readv(socket_.get(), parts, 2)
                                          : ::recv(socket_.get(), parts[1].iov_base, parts[1].iov_len, 0);
    if (got < 0) {
      if (errno != EINTR) on_receive_failure(errno);
      continue;
    }
    if (got == 0) {
      state_ = State::kEnded;
      os_error_ = send_error_;
      ++moved;
      break;
    }
    const auto bytes = static_cast<std::size_t>(got);
    // A short read has emptied the socket; but what a send has met is told only by a read that finds nothing.
    if (bytes < payload_left_ + parts[1].iov_len && !hangup_ && send_error_ == 0) readable_ = false;
    const std::size_t direct = std::min(bytes, payload_left_);
    into_ += direct;
    payload_left_ -= direct;
    ahead_bytes_ += bytes - direct;
    turn += bytes;
    ++moved;
    parse(sink, counters);
  }
  return moved;
}

// All that has come in and can be understood is delivered; less than a header stays in `ahead_`.
void Stream::parse(FrameSink& sink, TransportCounters& counters) noexcept {
  std::size_t at = 0;
  while (is_open()) {
    if (in_payload_) {
      const std::size_t here = std::min(ahead_bytes_ - at, payload_left_);
      if (here > 0) std::memcpy(into_, ahead_.data() + at, here);
      into_ += here;
      payload_left_ -= here;
      at += here;
      if (payload_left_ > 0) break;
      end_frame(sink, counters);
      continue;
    }
    if (bye_received_ && at < ahead_bytes_) state_ = State::kMalformed;  // nothing may follow it
    if (!is_open() || ahead_bytes_ - at < kHeaderBytes) break;
    std::memcpy(&frame_, ahead_.data() + at, kHeaderBytes);
    at += kHeaderBytes;
    begin_frame(sink, counters);
  }
  ahead_bytes_ -= at;
  std::memmove(ahead_.data(), ahead_.data() + at, ahead_bytes_);
}

void Stream::begin_frame(FrameSink& sink, TransportCounters& counters) noexcept {
  if (!is_well_formed(frame_)) {
    state_ = State::kMalformed;
  } else if (frame_.kind == FrameKind::kBye) {
    bye_received_ = true;
  } else if (frame_.payload_bytes == 0) {
    end_frame(sink, counters);
  } else {
    into_ = nullptr;
    if (sink.on_header(peer_, frame_, &into_) != Errc::kOk || into_ == nullptr) {
      state_ = State::kMalformed;
      return;
    }
    payload_left_ = frame_.payload_bytes;
    in_payload_ = true;
  }
}

void Stream::end_frame(FrameSink& sink, TransportCounters& counters) noexcept {
  in_payload_ = false;
  ++counters.frames_received;
  counters.bytes_received += wire_bytes(frame_);
  if (sink.on_frame(peer_, frame_) != Errc::kOk) state_ = State::kMalformed;
}

void Stream::on_receive_failure(int os_error) noexcept {
  readable_ = false;
  if (is_shortage(os_error)) {
    stalled_ = true;
  } else if (os_error != EAGAIN || send_error_ != 0) {
    state_ = State::kEnded;
    os_error_ = send_error_ != 0 ? send_error_ : os_error;
  }
}

int Stream::send(FrameSink& sink, TransportCounters& counters, bool* wanted, bool finishing) noexcept {
  int moved = 0;
  std::size_t turn = 0;
  while (is_writable() && turn < kTurnBytes && (has_unsent() || fill(sink, wanted, finishing))) {
    iovec parts[2 * kBatchFrames];
    std::size_t used = 0;
    std::size_t bytes = 0;
    for (std::size_t i = first_; i < count_; ++i) {
      const std::size_t skip = i == first_ ? sent_ : 0;
      used += add_parts(batch_[i], skip, parts + used);
      bytes += wire_bytes(batch_[i].frame) - skip;
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = used;
    const ssize_t gone = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL);
    if (gone < 0) {
      if (errno != EINTR) on_send_failure(errno);
      continue;
    }
    if (static_cast<std::size_t>(gone) < bytes) on_full();
    turn += static_cast<std::size_t>(gone);
    ++moved;
    complete(static_cast<std::size_t>(gone), sink, counters);
  }
  return moved;
}

// Takes a new batch from the sink; false if there is nothing to send, or no stream any more to send it on.
bool Stream::fill(FrameSink& sink, bool* wanted, bool finishing) noexcept {
  first_ = count_ = sent_ = 0;
  std::size_t bytes = 0;
  while (!bye_taken_ && (*wanted || finishing) && count_ < kBatchFrames && bytes < kBatchBytes) {
    OutFrame& out = batch_[count_];
    out = OutFrame{};
    *wanted = false;  // before asking: a notify from within the answer counts
    const bool taken = sink.next_frame(peer_, &out);
    if (!socket_.is_valid()) return false;
    if (taken) {
      *wanted = true;
      if (!is_well_formed(out.frame) || out.frame.kind == FrameKind::kBye) state_ = State::kMalformed;
      if (state_ != State::kOpen) return false;
    } else if (finishing) {
      out.frame.kind = FrameKind::kBye;
      bye_taken_ = true;
    } else {
      break;
    }
    bytes += wire_bytes(out.frame);
    ++count_;
  }
  return count_ > 0;
}

// `bytes` more of the batch have left.
void Stream::complete(std::size_t bytes, FrameSink& sink, TransportCounters& counters) noexcept {
  sent_ += bytes;
  while (first_ < count_ && sent_ >= wire_bytes(batch_[first_].frame)) {
    const OutFrame& out = batch_[first_];
    sent_ -= wire_bytes(out.frame);
    ++first_;
    if (out.frame.kind == FrameKind::kBye) continue;
    ++counters.frames_sent;
    counters.bytes_sent += wire_bytes(out.frame);
    sink.on_sent(peer_, out);
    if (!socket_.is_valid()) return;
  }
}

void Stream::on_send_failure(int os_error) noexcept {
  writable_ = false;
  if (is_shortage(os_error)) {
    stalled_ = true;
  } else if (os_error == EAGAIN) {
    on_full();
  } else {
    send_error_ = os_error;
    readable_ = true;
  }
}

void Stream::on_full() noexcept {
  writable_ = false;
  bound_.on_full(socket_.get());
}

}  // namespace commlib
