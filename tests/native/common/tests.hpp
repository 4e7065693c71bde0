// SPDX-License-Identifier: Apache-2.0
// As core.hpp, for the tests.
#pragma once

#include <doctest/doctest.h>

#include <cstdint>
#include <cstdlib>
#include <random>
#include <thread>

#include "common/core.hpp"

namespace commlib::test {

// How many of the seeds that a test of random orders or bytes has are tried: all of them, or with COMMLIB_TEST_QUICK (which
// `make check` sets) the first quarter.
inline std::uint64_t tried(std::uint64_t seeds) {
  static const bool is_quick = std::getenv("COMMLIB_TEST_QUICK") != nullptr;
  return is_quick ? (seeds + 3) / 4 : seeds;
}

}  // namespace commlib::test
