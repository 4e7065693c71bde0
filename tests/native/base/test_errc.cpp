// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cerrno>
#include <string>

#include "base/errc.hpp"

using commlib::Errc;
using commlib::Error;

namespace {

Error caught(void (*thrower)()) {
  try {
    thrower();
  } catch (const Error& error) {
    return error;
  }
  return {Errc::kOk, "nothing was thrown"};
}

}  // namespace

TEST_CASE("an error of the system says what was tried and why it failed") {
  const Error error = caught([] { commlib::throw_os_error("open the door", EACCES); });
  CHECK(error.code() == Errc::kInternal);
  CHECK(std::string(error.what()) == "open the door: Permission denied");
}

TEST_CASE("a system without memory or space is out of memory") {
  CHECK(caught([] { commlib::throw_os_error("x", ENOMEM); }).code() == Errc::kOutOfMemory);
  CHECK(caught([] { commlib::throw_os_error("x", ENOSPC); }).code() == Errc::kOutOfMemory);
}

TEST_CASE("a failed check throws and names the place and the expression; one that holds does nothing") {
  COMMLIB_CHECK(1 + 1 == 2);
  const Error error = caught([] { COMMLIB_CHECK(1 + 1 == 3); });
  CHECK(error.code() == Errc::kInternal);
  const std::string what = error.what();
  CHECK(what.find("test_errc.cpp:") != std::string::npos);
  CHECK(what.find("1 + 1 == 3") != std::string::npos);
}
