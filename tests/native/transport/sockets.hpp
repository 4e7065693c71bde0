// SPDX-License-Identifier: Apache-2.0
// Connected sockets for tests of the TCP transport.
#pragma once

#include <doctest/doctest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <utility>

#include "base/fd.hpp"

namespace commlib::test {

using FdPair = std::pair<Fd, Fd>;

// `buffer_bytes`: SO_SNDBUF and SO_RCVBUF, 0 for what the system gives. The kernel has a least size of its own.
inline void set_buffers(int socket, int buffer_bytes) {
  if (buffer_bytes == 0) return;
  REQUIRE(::setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &buffer_bytes, sizeof buffer_bytes) == 0);
  REQUIRE(::setsockopt(socket, SOL_SOCKET, SO_RCVBUF, &buffer_bytes, sizeof buffer_bytes) == 0);
}

inline FdPair unix_pair(int buffer_bytes = 0) {
  int both[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, both) == 0);
  for (const int socket : both) set_buffers(socket, buffer_bytes);
  return {Fd(both[0]), Fd(both[1])};
}

inline FdPair tcp_pair(int buffer_bytes = 0) {
  const Fd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  Fd one(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  REQUIRE((listener.is_valid() && one.is_valid()));
  set_buffers(listener.get(), buffer_bytes);  // inherited by what it accepts
  set_buffers(one.get(), buffer_bytes);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* const name = reinterpret_cast<sockaddr*>(&address);
  REQUIRE(::bind(listener.get(), name, length) == 0);
  REQUIRE(::listen(listener.get(), 1) == 0);
  REQUIRE(::getsockname(listener.get(), name, &length) == 0);
  REQUIRE(::connect(one.get(), name, length) == 0);
  Fd other(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  REQUIRE(other.is_valid());
  return {std::move(one), std::move(other)};
}

}  // namespace commlib::test
