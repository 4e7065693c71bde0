// SPDX-License-Identifier: Apache-2.0
#include "base/cpu.hpp"

#include <sched.h>

#include <cerrno>
#include <memory>

namespace commlib {

namespace {

struct FreeCpuSet {
  void operator()(cpu_set_t* set) const noexcept { CPU_FREE(set); }
};

}  // namespace

std::vector<int> affinity_cpus() {
  // The kernel refuses a mask shorter than its own (EINVAL), whose length is nowhere to be read: double until it fits.
  constexpr int kMostCpus = 1 << 20;
  for (int cpus = CPU_SETSIZE; cpus <= kMostCpus; cpus *= 2) {
    const std::unique_ptr<cpu_set_t, FreeCpuSet> set(CPU_ALLOC(cpus));
    if (!set) break;
    const std::size_t bytes = CPU_ALLOC_SIZE(cpus);
    CPU_ZERO_S(bytes, set.get());
    if (::sched_getaffinity(0, bytes, set.get()) == 0) {
      std::vector<int> found;
      for (int cpu = 0; cpu < cpus; ++cpu) {
        if (CPU_ISSET_S(cpu, bytes, set.get())) found.push_back(cpu);
      }
      return found;
    }
    if (errno != EINVAL) break;
  }
  return {};
}

}  // namespace commlib
