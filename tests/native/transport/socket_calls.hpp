// SPDX-License-Identifier: Apache-2.0
// Counts the system calls of the transport, and lets them fail. The functions defined here take the place of the C
// library's for the whole program, so exactly one file of a program includes this.
#pragma once

#include <dlfcn.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>

namespace commlib::test {

struct SocketCalls {
  std::atomic<std::uint64_t> sends{0}, receives{0}, waits{0}, polls{0}, writes{0};
  std::atomic<int> error{0};  // sends and receives meet this error …
  std::atomic<int> times{0};  // … so often

  // Relaxed throughout: counts, read when the threads that make them have been joined.
  void count(std::atomic<std::uint64_t>& counter) noexcept { counter.fetch_add(1, std::memory_order_relaxed); }

  [[nodiscard]] bool fails() noexcept {
    if (times.load(std::memory_order_relaxed) <= 0 || times.fetch_sub(1, std::memory_order_relaxed) <= 0) return false;
    errno = error.load(std::memory_order_relaxed);
    return true;
  }

  void fail(int with, int how_often) noexcept {
    error = with;
    times = how_often;
  }

  void clear() noexcept { sends = receives = waits = polls = writes = 0; }
};

inline SocketCalls socket_calls;

template <class Function>
Function* real_function(const char* name) noexcept {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace commlib::test

extern "C" {

ssize_t sendmsg(int socket, const msghdr* message, int flags) {
  static const auto real = commlib::test::real_function<decltype(sendmsg)>("sendmsg");
  commlib::test::socket_calls.count(commlib::test::socket_calls.sends);
  return commlib::test::socket_calls.fails() ? -1 : real(socket, message, flags);
}

ssize_t recv(int socket, void* into, size_t bytes, int flags) {
  static const auto real = commlib::test::real_function<decltype(recv)>("recv");
  commlib::test::socket_calls.count(commlib::test::socket_calls.receives);
  return commlib::test::socket_calls.fails() ? -1 : real(socket, into, bytes, flags);
}

ssize_t readv(int descriptor, const iovec* parts, int count) {
  static const auto real = commlib::test::real_function<decltype(readv)>("readv");
  commlib::test::socket_calls.count(commlib::test::socket_calls.receives);
  return commlib::test::socket_calls.fails() ? -1 : real(descriptor, parts, count);
}

int epoll_wait(int descriptor, epoll_event* events, int most, int timeout) {
  static const auto real = commlib::test::real_function<decltype(epoll_wait)>("epoll_wait");
  commlib::test::socket_calls.count(commlib::test::socket_calls.waits);
  return real(descriptor, events, most, timeout);
}

int poll(pollfd* descriptors, nfds_t count, int timeout) {
  static const auto real = commlib::test::real_function<decltype(poll)>("poll");
  commlib::test::socket_calls.count(commlib::test::socket_calls.polls);
  return real(descriptors, count, timeout);
}

ssize_t write(int descriptor, const void* from, size_t bytes) {
  static const auto real = commlib::test::real_function<decltype(write)>("write");
  commlib::test::socket_calls.count(commlib::test::socket_calls.writes);
  return real(descriptor, from, bytes);
}
}
