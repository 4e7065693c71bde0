// SPDX-License-Identifier: Apache-2.0
// One TcpTransport (node 0) whose peers are plain sockets in the hands of the test.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <vector>

#include "base/clock.hpp"
#include "sockets.hpp"
#include "test_sink.hpp"
#include "transport/tcp.hpp"
#include "world.hpp"

namespace commlib::test {

using Bytes = std::vector<std::byte>;

// The number-th frame of `from` as it looks on the wire.
inline void append_frame(Bytes* wire, const Frame& frame) {
  const std::size_t at = wire->size();
  wire->resize(at + sizeof frame + frame.payload_bytes);
  std::memcpy(wire->data() + at, &frame, sizeof frame);
  fill_payload(wire->data() + at + sizeof frame, frame.payload_bytes, frame.hash);
}

inline Frame bye_frame() {
  Frame frame;
  frame.kind = FrameKind::kBye;
  return frame;
}

inline Bytes wire_of(const Frame& frame) {
  Bytes wire;
  append_frame(&wire, frame);
  return wire;
}

// Node 0 and its peers 1 … n; `raw[peer − 1][stream]` are the test's ends.
class RawPeers {
 public:
  explicit RawPeers(PeerId peers = 1, std::uint32_t streams = 1, FdPair (*connect)(int) = unix_pair,
                    int buffer_bytes = 0, TcpOptions options = {}) {
    std::vector<std::vector<Fd>> sockets(peers + 1);
    raw.resize(peers);
    for (PeerId peer = 1; peer <= peers; ++peer) {
      for (std::uint32_t i = 0; i < streams; ++i) {
        FdPair pair = connect(buffer_bytes);
        given.push_back(pair.first.get());
        sockets[peer].push_back(std::move(pair.first));
        raw[peer - 1].push_back(std::move(pair.second));
      }
    }
    transport = std::make_unique<TcpTransport>(std::move(sockets), options);
    transport->attach(&sink);
  }

  int step() {
    sink.may_call = true;
    const int moved = transport->do_work();
    sink.may_call = false;
    return moved;
  }

  // As its loop would run it, until `done`; false if that never comes.
  template <class Done>
  bool run_until(Done done, int patience_ms = kPatienceMs) {
    const std::int64_t end_ms = now_ms() + patience_ms;
    while (!done()) {
      if (step() > 0) continue;
      if (now_ms() >= end_ms || done()) return done();
      is_readable(transport->descriptor(), 1);  // no longer: `done` may be what makes it go on
    }
    return true;
  }

  // Until nothing is to do at this moment. What has been written to a local socket has arrived by then.
  void run() {
    while (step() > 0 || is_readable(transport->descriptor())) {
    }
  }

  void feed(std::span<const std::byte> bytes, PeerId peer = 1, std::size_t stream = 0) {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(raw[peer - 1][stream].get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      REQUIRE(sent > 0);
      bytes = bytes.subspan(static_cast<std::size_t>(sent));
    }
  }

  void feed_frame(std::uint64_t number, std::uint32_t payload_bytes, PeerId peer = 1, std::size_t stream = 0) {
    feed(wire_of(made_frame(peer, 0, number, payload_bytes)), peer, stream);
  }

  // What lies ready for the test on that stream, at most `limit` bytes.
  Bytes drain(PeerId peer = 1, std::size_t stream = 0, std::size_t limit = 1 << 20) {
    Bytes bytes(limit);
    const ssize_t got = ::recv(raw[peer - 1][stream].get(), bytes.data(), limit, MSG_DONTWAIT);
    bytes.resize(got > 0 ? static_cast<std::size_t>(got) : 0);
    return bytes;
  }

  void send(std::uint32_t payload_bytes, PeerId peer = 1) {
    sink.queue(peer, payload_bytes);
    transport->notify(peer);
  }

  [[nodiscard]] bool is_closed(PeerId peer, Errc code, int os_error) {
    const TestSink::Closed& closed = sink.closed(peer);
    return closed.times == 1 && closed.code == code && closed.os_error == os_error;
  }

  void check_contract() {
    CHECK(sink.violations.size() == 0);
    if (!sink.violations.empty()) FAIL_CHECK(sink.violations.front());
  }

  // Closing sends a reset instead of an end of file.
  void reset(PeerId peer = 1, std::size_t stream = 0) {
    const linger at_once{1, 0};
    Fd& socket = raw[peer - 1][stream];
    REQUIRE(::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once) == 0);
    socket.reset();
  }

  TestSink sink{0};
  std::vector<std::vector<Fd>> raw;
  std::vector<int> given;  // the descriptors that the transport has
  std::unique_ptr<TcpTransport> transport;
};

}  // namespace commlib::test
