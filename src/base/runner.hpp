// SPDX-License-Identifier: Apache-2.0
// Loops and the threads they may run on. A loop is `do_work() → count`; everything about threads is here, so that tests
// run any loop by hand with `step()` and no thread at all.
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace commlib {

class Loop {
 public:
  virtual ~Loop() = default;

  // Take a bounded batch of work, return how much was done. Never sleeps, never waits. It throws for a bug only
  // (COMMLIB_CHECK); the runner then reports the loop as failed.
  [[nodiscard]] virtual int do_work() = 0;

  // Sleep until there may be work. May return early. A wake() that came after the last do_work began must end it at once.
  virtual void wait_for_work() noexcept = 0;

  // From any thread, never blocks: ends wait_for_work.
  virtual void wake() noexcept = 0;
};

class Runner {
 public:
  // `on_failure` is called once, on the loop's thread, when do_work threw; the loop does not run again.
  Runner(std::string name, Loop& loop, std::function<void(const char* what)> on_failure, std::vector<int> cpus = {});
  ~Runner();  // stop()
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;

  void start();          // makes the thread (named, signals blocked, bound to `cpus` if any); throws Error
  int step();            // without a thread: one do_work, exceptions go to on_failure
  void stop() noexcept;  // asks, wakes and joins; may be repeated; not from the loop's own thread

 private:
  void run() noexcept;
  void fail(const char* what) noexcept;

  std::string name_;
  Loop& loop_;
  std::function<void(const char*)> on_failure_;
  std::vector<int> cpus_;
  std::atomic<bool> stopping_{false};
  bool failed_ = false;  // the loop's thread, or the one that steps
  std::thread thread_;
};

}  // namespace commlib
