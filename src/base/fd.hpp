// SPDX-License-Identifier: Apache-2.0
// A file descriptor with one owner.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <utility>

namespace commlib {

class Fd {
 public:
  Fd() noexcept = default;
  explicit Fd(int owned) noexcept : fd_(owned) {}  // takes it; a negative number is "none"
  ~Fd() { reset(); }
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) reset(other.release());
    return *this;
  }

  // Another descriptor of the same thing, closed on exec; the argument stays its owner's. Invalid, with errno, on
  // failure.
  [[nodiscard]] static Fd duplicate(int borrowed) noexcept { return Fd(::fcntl(borrowed, F_DUPFD_CLOEXEC, 0)); }

  [[nodiscard]] int get() const noexcept { return fd_; }
  [[nodiscard]] bool is_valid() const noexcept { return fd_ >= 0; }
  [[nodiscard]] int release() noexcept { return std::exchange(fd_, -1); }  // the caller closes it

  // An interrupted close has closed on Linux, so it is never repeated.
  void reset(int owned = -1) noexcept {
    const int old = std::exchange(fd_, owned);
    if (old >= 0) ::close(old);
  }

 private:
  int fd_ = -1;
};

}  // namespace commlib
