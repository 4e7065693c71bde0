// SPDX-License-Identifier: Apache-2.0
// Time that only goes forward, the same for all processes of a host. For intervals; it is not the time of day.
#pragma once

#include <cstdint>
#include <ctime>

namespace commlib {

[[nodiscard]] inline std::int64_t now_ns() noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);  // cannot fail for this clock
  return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

[[nodiscard]] inline std::int64_t now_ms() noexcept { return now_ns() / 1'000'000; }

}  // namespace commlib
