// SPDX-License-Identifier: Apache-2.0
#include "base/errc.hpp"

#include <cerrno>
#include <system_error>

namespace commlib {

void throw_os_error(const std::string& what, int os_error) {
  const bool exhausted = os_error == ENOMEM || os_error == ENOSPC;
  throw Error(exhausted ? Errc::kOutOfMemory : Errc::kInternal,
              what + ": " + std::generic_category().message(os_error));
}

void check_failed(const char* file, int line, const char* expression) {
  throw Error(Errc::kInternal, std::string("bug in commlib: ") + file + ":" + std::to_string(line) +
                                   ": this does not hold: " + expression);
}

}  // namespace commlib
