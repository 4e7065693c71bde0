// SPDX-License-Identifier: Apache-2.0
// What the kernel may hold of a stream: little of a slow one, as much as it likes of a fast one.
#include <chrono>
#include <thread>
#include <vector>

#include "sockets.hpp"
#include "transport/send_bound.hpp"

namespace commlib::test {

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

int send_buffer(const Fd& socket) {
  int bytes = 0;
  socklen_t length = sizeof bytes;
  must(::getsockopt(socket.get(), SOL_SOCKET, SO_SNDBUF, &bytes, &length));
  return bytes;
}

// Sends until `ends` says so, and tells `bound` each time that the socket is full; then the other end is read: one
// piece and a pause if it is slow, or all there is. False after ten seconds.
template <class Condition>
bool carry_until(const FdPair& pair, SendBound& bound, bool slow, const Condition& ends) {
  std::vector<char> bytes(256 * 1024);
  for (const auto end = Clock::now() + 10s; Clock::now() < end;) {
    while (::send(pair.first.get(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL) > 0) {
    }
    bound.on_full(pair.first.get());
    if (ends()) return true;
    if (slow) {
      must(static_cast<int>(::recv(pair.second.get(), bytes.data(), 8 * 1024, MSG_DONTWAIT)));
      std::this_thread::sleep_for(1ms);
    } else {
      while (::recv(pair.second.get(), bytes.data(), bytes.size(), MSG_DONTWAIT) > 0) {
      }
    }
  }
  return false;
}

}  // namespace

TEST_CASE("a stream may have as much in the kernel as it needs") {
  constexpr std::uint64_t kMBps = 1'000'000;
  CHECK(SendBound::bytes_for(0, 100) == 64 * 1024);
  CHECK(SendBound::bytes_for(1 * kMBps, 100) == 64 * 1024);
  CHECK(SendBound::bytes_for(40 * kMBps, 0) == 80'000);
  CHECK(SendBound::bytes_for(40 * kMBps, 1'000) == 120'000);
  CHECK(SendBound::bytes_for(131 * kMBps, 0) == 262'000);
  CHECK(SendBound::bytes_for(132 * kMBps, 0) == 0);
  CHECK(SendBound::bytes_for(1 * kMBps, 2'001) == 0);
  CHECK(SendBound::bytes_for(40 * kMBps, 50'000) == 0);             // far away
  CHECK(SendBound::bytes_for(50'000 * kMBps, 4'000'000'000) == 0);  // no overflow
}

TEST_CASE("a slow stream is bounded, until it is fast") {
  const FdPair pair = tcp_pair();
  SendBound bound;
  CHECK(carry_until(pair, bound, true, [&] { return send_buffer(pair.first) == 64 * 1024; }));
  CHECK(carry_until(pair, bound, false, [&] { return send_buffer(pair.first) > 256 * 1024; }));
}

TEST_CASE("a socket that is no TCP is left alone") {
  const FdPair pair = unix_pair();
  SendBound bound;
  const int before = send_buffer(pair.first);
  int calls = 0;
  CHECK(carry_until(pair, bound, true, [&] { return ++calls > 100; }));
  CHECK(send_buffer(pair.first) == before);
}

}  // namespace commlib::test
