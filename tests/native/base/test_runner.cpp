// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <csignal>
#include <stdexcept>
#include <string>

#include "base/cpu.hpp"
#include "base/errc.hpp"
#include "base/event_fd.hpp"
#include "base/futex.hpp"
#include "base/runner.hpp"

using commlib::Doorbell;
using commlib::Errc;
using commlib::Error;
using commlib::Loop;
using commlib::Runner;

namespace {

// Counts down what it was given, sleeping whenever there is nothing.
class CountdownLoop : public Loop {
 public:
  int do_work() override {
    ticket_ = doorbell_.ticket();
    ++calls;
    if (on_work) on_work();
    int left = work.load();
    if (left == 0) return 0;
    work.store(left - 1);
    if (left == 1) finished.ring();
    return 1;
  }
  void wait_for_work() noexcept override {
    waits.fetch_add(1);
    (void)doorbell_.wait(ticket_, -1);
  }
  void wake() noexcept override { doorbell_.ring(); }

  void give(int amount) {
    const auto ticket = finished.ticket();
    work.store(amount);
    wake();
    while (!finished.wait(ticket, -1)) {
    }
  }

  std::atomic<int> work{0};
  std::atomic<int> calls{0};
  std::atomic<int> waits{0};
  std::function<void()> on_work;
  Doorbell finished;

 private:
  Doorbell doorbell_;
  std::uint32_t ticket_ = 0;
};

}  // namespace

TEST_CASE("a loop can be stepped by hand, without any thread") {
  CountdownLoop loop;
  Runner runner("cl-test", loop, nullptr);
  loop.work = 2;
  CHECK(runner.step() == 1);
  CHECK(runner.step() == 1);
  CHECK(runner.step() == 0);
  CHECK(loop.calls.load() == 3);
  CHECK(loop.waits.load() == 0);
}

TEST_CASE("a running loop sleeps when it has nothing to do and works when it is woken") {
  CountdownLoop loop;
  Runner runner("cl-test", loop, nullptr);
  runner.start();
  for (int i = 1; i <= 100; ++i) loop.give(i);
  CHECK(loop.work.load() == 0);
  runner.stop();
  const int calls = loop.calls.load();
  // Work, and one look at nothing for each sleep; a loop that spins would have made many more.
  CHECK(calls <= 5050 + loop.waits.load() + 1);
  // Once for each piece of work, twice where the work was seen before its wake; a loop that cannot sleep waits far oftener.
  CHECK(loop.waits.load() <= 202);
}

TEST_CASE("stopping may come at any moment, may be repeated, and never hangs") {
  for (int i = 0; i < 300; ++i) {
    CountdownLoop loop;
    Runner runner("cl-test", loop, nullptr);
    if (i % 3 != 0) runner.start();
    if (i % 3 == 2) loop.give(1);
    runner.stop();
    runner.stop();
  }
}

TEST_CASE("a runner starts once") {
  CountdownLoop loop;
  Runner runner("cl-test", loop, nullptr);
  runner.start();
  CHECK_THROWS_AS(runner.start(), Error);
  runner.stop();
  CHECK_THROWS_AS(runner.start(), Error);
}

TEST_CASE("a loop that throws is reported once and does not run again") {
  CountdownLoop loop;
  std::string reported;
  int reports = 0;
  const auto on_failure = [&](const char* what) {
    reported = what;
    ++reports;
  };
  SUBCASE("by hand") {
    Runner runner("cl-test", loop, on_failure);
    loop.on_work = [] { COMMLIB_CHECK(2 < 1); };
    CHECK(runner.step() == 0);
    CHECK(runner.step() == 0);
    CHECK(loop.calls.load() == 1);
    CHECK(reported.find("2 < 1") != std::string::npos);
  }
  SUBCASE("on a thread") {
    loop.on_work = [] { throw std::runtime_error("broken"); };
    Runner runner("cl-test", loop, on_failure);
    runner.start();
    runner.stop();
    CHECK(loop.calls.load() <= 1);
    if (loop.calls.load() == 0) runner.step();  // it was stopped before it began
    CHECK(reported == "broken");
  }
  SUBCASE("something that is no exception") {
    loop.on_work = [] { throw 42; };  // NOLINT
    Runner runner("cl-test", loop, on_failure);
    CHECK(runner.step() == 0);
    CHECK(reported == "unknown exception");
  }
  CHECK(reports == 1);
}

TEST_CASE("the thread has its name, its CPUs and no signals, and the caller keeps its own") {
  const int cpu = commlib::affinity_cpus().back();
  sigset_t before;
  pthread_sigmask(SIG_SETMASK, nullptr, &before);

  CountdownLoop loop;
  char name[16] = {};
  int cpus = 0;
  bool on_cpu = false;
  bool blocked = false;
  // The name and the CPUs are set by the starter, so ask in a second piece of work, after start() has returned.
  loop.on_work = [&] {
    if (loop.work.load() == 0) return;
    pthread_getname_np(pthread_self(), name, sizeof name);
    cpus = static_cast<int>(commlib::affinity_cpus().size());
    on_cpu = ::sched_getcpu() == cpu;
    sigset_t mine;
    pthread_sigmask(SIG_SETMASK, nullptr, &mine);
    blocked = sigismember(&mine, SIGINT) == 1 && sigismember(&mine, SIGTERM) == 1 && sigismember(&mine, SIGCHLD) == 1;
  };
  Runner runner("cl-a-name-that-is-too-long", loop, nullptr, {cpu});
  runner.start();
  loop.give(1);
  runner.stop();
  CHECK(std::string(name) == "cl-a-name-that-");
  CHECK(cpus == 1);
  CHECK(on_cpu);
  CHECK(blocked);

  sigset_t after;
  pthread_sigmask(SIG_SETMASK, nullptr, &after);
  CHECK(sigismember(&after, SIGINT) == sigismember(&before, SIGINT));
}

TEST_CASE("CPUs that do not exist are a configuration error, and no thread is left") {
  CountdownLoop loop;
  for (const int cpu : {-1, 100'000}) {
    Runner runner("cl-test", loop, nullptr, {cpu});
    try {
      runner.start();
      FAIL_CHECK("no error");
    } catch (const Error& error) {
      CHECK(error.code() == Errc::kConfig);
      CHECK(std::string(error.what()).find("cl-test") != std::string::npos);
    }
  }
}
