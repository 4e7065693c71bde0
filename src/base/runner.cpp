// SPDX-License-Identifier: Apache-2.0
#include "base/runner.hpp"

#include <pthread.h>
#include <sched.h>

#include <csignal>
#include <exception>
#include <memory>
#include <system_error>
#include <utility>

#include "base/errc.hpp"

namespace commlib {

namespace {

// Blocks all signals of this thread while it lives. A thread made meanwhile inherits that: signals belong to the
// program's own threads, and a handler of Python's must not run on ours.
class SignalsBlocked {
 public:
  SignalsBlocked() noexcept {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

struct FreeCpuSet {
  void operator()(cpu_set_t* set) const noexcept { CPU_FREE(set); }
};

// An errno value, 0 for success.
int bind_thread(pthread_t thread, const std::vector<int>& cpus) {
  int highest = 0;
  for (const int cpu : cpus) {
    if (cpu < 0) return EINVAL;
    if (cpu > highest) highest = cpu;
  }
  const std::unique_ptr<cpu_set_t, FreeCpuSet> set(CPU_ALLOC(highest + 1));
  if (!set) return ENOMEM;
  const std::size_t bytes = CPU_ALLOC_SIZE(highest + 1);
  CPU_ZERO_S(bytes, set.get());
  for (const int cpu : cpus) CPU_SET_S(cpu, bytes, set.get());
  return pthread_setaffinity_np(thread, bytes, set.get());
}

}  // namespace

Runner::Runner(std::string name, Loop& loop, std::function<void(const char*)> on_failure, std::vector<int> cpus)
    : name_(std::move(name)), loop_(loop), on_failure_(std::move(on_failure)), cpus_(std::move(cpus)) {}

Runner::~Runner() { stop(); }

void Runner::start() {
  COMMLIB_CHECK(!thread_.joinable() && !stopping_.load(std::memory_order_relaxed));
  try {
    const SignalsBlocked blocked;
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    throw_os_error("cannot start thread " + name_, error.code().value());
  }
  // The kernel keeps 15 characters and refuses longer names.
  pthread_setname_np(thread_.native_handle(), name_.substr(0, 15).c_str());
  if (cpus_.empty()) return;
  if (const int os_error = bind_thread(thread_.native_handle(), cpus_); os_error != 0) {
    stop();
    throw Error(Errc::kConfig, "cannot bind thread " + name_ +
                                   " to the CPUs it was given: " + std::generic_category().message(os_error));
  }
}

int Runner::step() {
  if (failed_) return 0;
  try {
    return loop_.do_work();
  } catch (const std::exception& error) {
    fail(error.what());
  } catch (...) {
    fail("unknown exception");
  }
  return 0;
}

void Runner::stop() noexcept {
  stopping_.store(true, std::memory_order_release);  // acquired by run(); before the wake, see there
  loop_.wake();
  if (thread_.joinable()) thread_.join();
}

void Runner::run() noexcept {
  while (!stopping_.load(std::memory_order_acquire)) {
    const int done = step();
    if (failed_) return;
    // Asked again after the work: a wake that came before do_work began need not end the wait, but then stop() had
    // already said why it woke.
    if (done == 0 && !stopping_.load(std::memory_order_acquire)) loop_.wait_for_work();
  }
}

void Runner::fail(const char* what) noexcept {
  failed_ = true;
  if (on_failure_) on_failure_(what);
}

}  // namespace commlib
