// SPDX-License-Identifier: Apache-2.0
// The processors this process may use.
#pragma once

#include <vector>

#include "base/simd.hpp"  // cpu_relax

namespace commlib {

// The CPUs in the affinity mask of the calling thread, ascending. Empty only if the kernel does not say.
[[nodiscard]] std::vector<int> affinity_cpus();

}  // namespace commlib
