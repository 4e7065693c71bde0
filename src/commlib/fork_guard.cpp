// SPDX-License-Identifier: Apache-2.0
#include "commlib/fork_guard.hpp"

#include <pthread.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "base/errc.hpp"

namespace commlib {

namespace {

struct Registry {
  std::mutex mutex;  // guards members; held across fork, so that the child sees a whole list
  std::vector<ForkGuard::Member*> members;
};

// Never destroyed: a fork may come after static destructors have begun.
Registry& registry() {
  static auto* const kRegistry = new Registry;
  return *kRegistry;
}

}  // namespace

void ForkGuard::before_fork() noexcept { registry().mutex.lock(); }
void ForkGuard::after_fork_in_parent() noexcept { registry().mutex.unlock(); }
void ForkGuard::after_fork_in_child() noexcept {
  for (Member* member : registry().members) member->in_forked_child();
  registry().members.clear();
  registry().mutex.unlock();
}

ForkGuard::Member::Member() {
  static const int kInstalled = ::pthread_atfork(&before_fork, &after_fork_in_parent, &after_fork_in_child);
  if (kInstalled != 0) throw_os_error("pthread_atfork", kInstalled);
  const std::lock_guard lock(registry().mutex);
  registry().members.push_back(this);
}

ForkGuard::Member::~Member() {
  const std::lock_guard lock(registry().mutex);
  std::erase(registry().members, this);
}

}  // namespace commlib
