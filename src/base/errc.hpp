// SPDX-License-Identifier: Apache-2.0
// Outcomes. Inside the core they are values; set-up code throws Error; Python sees the classes of commlib/errors.py.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace commlib {

// The numbers are shared with commlib/errors.py (a test compares the two lists).
enum class Errc : int {
  kOk = 0,
  kAgain = 1,  // not now; not an error
  kNotInitialized = 2,
  kMismatch = 3,
  kDuplicateName = 4,
  kPeerLost = 5,
  kTimeout = 6,
  kAuthentication = 7,
  kUnsupported = 8,
  kConfig = 9,
  kOutOfMemory = 10,
  kShutDown = 11,  // this process has shut the library down
  kInternal = 12,
};

// Thrown by constructors and other set-up, never on the hot path.
class Error : public std::runtime_error {
 public:
  Error(Errc code, const std::string& what) : std::runtime_error(what), code_(code) {}
  [[nodiscard]] Errc code() const noexcept { return code_; }

 private:
  Errc code_;
};

// Throws kOutOfMemory/kInternal with `what` and the text of `os_error` (an errno value).
[[noreturn]] void throw_os_error(const std::string& what, int os_error);

[[noreturn]] void check_failed(const char* file, int line, const char* expression);

}  // namespace commlib

// A bug in commlib, not in its use: throws kInternal. Runner turns it into a failed worker; nothing aborts.
#define COMMLIB_CHECK(expression) \
  ((expression) ? static_cast<void>(0) : ::commlib::check_failed(__FILE__, __LINE__, #expression))
