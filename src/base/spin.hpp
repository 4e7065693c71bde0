// SPDX-License-Identifier: Apache-2.0
// Looking again and again, for some microseconds, where sleeping would take longer.
#pragma once

#include <cstdint>

#include "base/clock.hpp"
#include "base/simd.hpp"

namespace commlib {

// True as soon as `is_so()`; false when it has not been for `limit_us`. 0: does not look.
template <typename Condition>
[[nodiscard]] bool spin_until(int limit_us, Condition is_so) noexcept {
  if (limit_us <= 0) return false;
  const std::int64_t until = now_ns() + std::int64_t{1000} * limit_us;
  do {
    for (int i = 0; i < 16; ++i) {  // reading the clock costs about as much as this
      cpu_relax();
      if (is_so()) return true;
    }
  } while (now_ns() < until);
  return false;
}

}  // namespace commlib
