// SPDX-License-Identifier: Apache-2.0
// A wake-up that epoll can see: readable from signal() until drain().
#pragma once

#include <sys/eventfd.h>

#include <cerrno>
#include <cstdint>

#include "base/errc.hpp"
#include "base/fd.hpp"

namespace commlib {

class EventFd {
 public:
  EventFd() : fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (!fd_.is_valid()) throw_os_error("eventfd", errno);
  }

  // Any thread; never blocks. The one failure there is, a full counter, leaves it readable, which is all that is
  // wanted.
  void signal() noexcept {
    const std::uint64_t one = 1;
    while (::write(fd_.get(), &one, sizeof one) < 0 && errno == EINTR) {
    }
  }

  // True if it had been signalled since the last drain.
  bool drain() noexcept {
    std::uint64_t signals = 0;
    ssize_t got = 0;
    do {
      got = ::read(fd_.get(), &signals, sizeof signals);
    } while (got < 0 && errno == EINTR);
    return got == static_cast<ssize_t>(sizeof signals);
  }

  [[nodiscard]] int descriptor() const noexcept { return fd_.get(); }
  void close() noexcept { fd_.reset(); }  // signal and drain do nothing any more; not while others may use it

 private:
  Fd fd_;
};

}  // namespace commlib
