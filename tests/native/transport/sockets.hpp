// SPDX-License-Identifier: Apache-2.0
// Connected sockets for tests of the TCP transport.
#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <utility>

#include "base/errc.hpp"
#include "base/fd.hpp"

namespace commlib::test {

using FdPair = std::pair<Fd, Fd>;

inline int must(int result) {
  if (result < 0) throw_os_error("a socket of the test", errno);
  return result;
}

// `buffer_bytes`: SO_SNDBUF and SO_RCVBUF, 0 for what the system gives. The kernel has a least size of its own.
inline void set_buffers(int socket, int buffer_bytes) {
  if (buffer_bytes == 0) return;
  must(::setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &buffer_bytes, sizeof buffer_bytes));
  must(::setsockopt(socket, SOL_SOCKET, SO_RCVBUF, &buffer_bytes, sizeof buffer_bytes));
}

inline FdPair unix_pair(int buffer_bytes = 0) {
  int both[2];
  must(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, both));
  for (const int socket : both) set_buffers(socket, buffer_bytes);
  return {Fd(both[0]), Fd(both[1])};
}

inline FdPair tcp_pair(int buffer_bytes = 0) {
  const Fd listener(must(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)));
  Fd one(must(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)));
  set_buffers(listener.get(), buffer_bytes);  // inherited by what it accepts
  set_buffers(one.get(), buffer_bytes);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* const name = reinterpret_cast<sockaddr*>(&address);
  must(::bind(listener.get(), name, length));
  must(::listen(listener.get(), 1));
  must(::getsockname(listener.get(), name, &length));
  must(::connect(one.get(), name, length));
  Fd other(must(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC)));
  return {std::move(one), std::move(other)};
}

}  // namespace commlib::test
