// SPDX-License-Identifier: Apache-2.0
// One connected stream socket of the TCP transport: bytes on one side, frames on the other. It knows neither epoll nor
// the other streams of its peer; TcpTransport tells it what may be possible and asks it afterwards what has become of
// it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/fd.hpp"
#include "transport/send_bound.hpp"
#include "transport/transport.hpp"

namespace commlib {

class Stream {
 public:
  enum class State : std::uint8_t {
    kOpen,
    kEnded,      // end of file or error, see os_error()
    kMalformed,  // the other side broke the protocol, or the sink refused or offered something it must not
  };

  // Takes a connected socket and prepares it: not blocking, closed on exec, TCP options where it is TCP. Throws Error.
  Stream(PeerId peer, Fd socket, int peer_timeout_ms, std::uint32_t notsent_lowat_bytes);

  // --- what the socket allows: set from events, cleared when a system call shows the contrary

  [[nodiscard]] bool is_readable() const noexcept { return readable_ && is_open(); }
  [[nodiscard]] bool is_writable() const noexcept { return writable_ && is_open(); }
  void on_events(std::uint32_t epoll_events) noexcept;

  // True after the kernel had no memory for us: no event will tell when it has, so somebody has to try again later.
  [[nodiscard]] bool is_stalled() const noexcept { return stalled_; }
  void try_again() noexcept;

  // --- work; both return how many pieces moved, call the sink, and stop at once when a callback closes this stream

  int receive(FrameSink& sink, TransportCounters& counters) noexcept;

  // Asks the sink for frames while `*wanted`, which follows its answers; BYE follows its "nothing" when `finishing`.
  int send(FrameSink& sink, TransportCounters& counters, bool* wanted, bool finishing) noexcept;

  // --- what has become of it

  [[nodiscard]] PeerId peer() const noexcept { return peer_; }
  [[nodiscard]] int descriptor() const noexcept { return socket_.get(); }
  [[nodiscard]] bool is_open() const noexcept { return socket_.is_valid() && state_ == State::kOpen; }
  [[nodiscard]] State state() const noexcept { return state_; }
  [[nodiscard]] int os_error() const noexcept { return os_error_; }  // 0: end of file
  [[nodiscard]] bool has_unsent() const noexcept { return first_ < count_; }
  [[nodiscard]] bool takes_frames() const noexcept { return !bye_taken_; }
  [[nodiscard]] bool is_bye_sent() const noexcept { return bye_taken_ && !has_unsent(); }
  [[nodiscard]] bool is_bye_received() const noexcept { return bye_received_; }

  void close() noexcept { socket_.reset(); }  // async-signal-safe

 private:
  static constexpr std::size_t kBatchFrames = 16;

  bool fill(FrameSink& sink, bool* wanted, bool finishing) noexcept;
  void complete(std::size_t bytes, FrameSink& sink, TransportCounters& counters) noexcept;
  void parse(FrameSink& sink, TransportCounters& counters) noexcept;
  void begin_frame(FrameSink& sink, TransportCounters& counters) noexcept;
  void end_frame(FrameSink& sink, TransportCounters& counters) noexcept;
  void on_receive_failure(int os_error) noexcept;
  void on_send_failure(int os_error) noexcept;
  void on_full() noexcept;

  Fd socket_;
  const PeerId peer_;
  State state_ = State::kOpen;
  int os_error_ = 0;
  int send_error_ = 0;  // what a send met; told only when all that had come in before is read
  bool readable_ = false;
  bool writable_ = false;
  bool hangup_ = false;  // an end of file or error waits behind the data
  bool stalled_ = false;
  bool bye_received_ = false;
  bool bye_taken_ = false;

  // Sending: frames first_ … count_ − 1 of the batch have been taken from the sink; `sent_` bytes of the first are
  // gone.
  std::array<OutFrame, kBatchFrames> batch_;
  std::size_t first_ = 0;
  std::size_t count_ = 0;
  std::size_t sent_ = 0;
  SendBound bound_;

  // Receiving: the frame of which `payload_left_` bytes are missing, to be put at `into_`.
  Frame frame_;
  bool in_payload_ = false;
  std::byte* into_ = nullptr;
  std::size_t payload_left_ = 0;

  // What was read beyond the payload at hand. Small, because the start of a payload that lands here is copied once
  // more; large enough that many small frames come with one system call.
  std::array<std::byte, 4096> ahead_;
  std::size_t ahead_bytes_ = 0;
};

}  // namespace commlib
