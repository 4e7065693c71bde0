// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "base/futex.hpp"

using commlib::Doorbell;

namespace {

// Waits until `doorbell` has `sleepers`, so that a test knows that a ring meets somebody asleep (or about to be).
void await_sleepers(const Doorbell& doorbell, std::uint32_t sleepers) {
  while (doorbell.sleepers.load(std::memory_order_acquire) < sleepers) std::this_thread::yield();
}

struct Shared {
  Doorbell to_child;
  Doorbell to_parent;
  std::atomic<std::uint32_t> value;
};

Shared* map_shared() {
  void* const memory = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(memory != MAP_FAILED);
  return static_cast<Shared*>(memory);  // all zero, which is what the doorbells promise to live with
}

}  // namespace

TEST_CASE("a futex does not sleep when the word has changed already") {
  const std::atomic<std::uint32_t> word{7};
  commlib::futex_wait(word, 6, -1);  // would hang
  CHECK(word.load() == 7);
}

TEST_CASE("a futex wait ends after its time, and not much before") {
  const std::atomic<std::uint32_t> word{7};
  const auto begin = commlib::now_ns();
  while (commlib::now_ns() - begin < 20'000'000) commlib::futex_wait(word, 7, 20);
  CHECK(commlib::now_ns() - begin < 5'000'000'000);
}

TEST_CASE("a doorbell that has rung since the ticket does not make anybody wait") {
  Doorbell doorbell;
  const auto ticket = doorbell.ticket();
  doorbell.ring();
  CHECK(doorbell.wait(ticket, -1));
  CHECK(doorbell.wait(ticket, -1, 50));
  CHECK(doorbell.sleepers.load() == 0);
}

TEST_CASE("a doorbell that nobody rings times out, spinning or not, and says so") {
  Doorbell doorbell;
  const auto ticket = doorbell.ticket();
  CHECK_FALSE(doorbell.wait(ticket, 0));
  CHECK_FALSE(doorbell.wait(ticket, 5));
  CHECK_FALSE(doorbell.wait(ticket, 0, 100));
  CHECK_FALSE(doorbell.wait(ticket, 5, 100));
  CHECK(doorbell.sleepers.load() == 0);
}

TEST_CASE("one ring wakes all sleepers of a doorbell") {
  Doorbell doorbell;
  const auto ticket = doorbell.ticket();
  std::atomic<int> woken{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      while (!doorbell.wait(ticket, -1)) {
      }
      ++woken;
    });
  }
  await_sleepers(doorbell, 4);
  doorbell.ring();
  for (auto& thread : threads) thread.join();
  CHECK(woken.load() == 4);
  CHECK(doorbell.sleepers.load() == 0);
}

TEST_CASE("a signal ends a wait on a doorbell early") {
  Doorbell doorbell;
  struct sigaction action{};
  struct sigaction before{};
  action.sa_handler = [](int) {};
  sigaction(SIGUSR1, &action, &before);
  std::atomic<bool> done{false};
  std::thread sleeper([&] {
    CHECK_FALSE(doorbell.wait(doorbell.ticket(), -1));
    done.store(true);
  });
  while (!done.load()) {  // again and again: the first may come before it sleeps
    pthread_kill(sleeper.native_handle(), SIGUSR1);
    std::this_thread::yield();
  }
  sleeper.join();
  sigaction(SIGUSR1, &before, nullptr);
}

TEST_CASE("no ring is lost between several ringers and several sleepers") {
  constexpr int kRingers = 3;
  constexpr int kSleepers = 3;
  constexpr int kItems = 3000;  // for each ringer
  Doorbell doorbell;
  std::atomic<int> available{0};
  std::atomic<int> taken{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kSleepers; ++i) {
    threads.emplace_back([&, i] {
      for (;;) {
        const auto ticket = doorbell.ticket();
        // Relaxed on purpose: only the doorbell makes the items visible.
        int items = available.load(std::memory_order_relaxed);
        while (items > 0 && !available.compare_exchange_weak(items, items - 1, std::memory_order_relaxed)) {
        }
        if (items > 0) {
          if (taken.fetch_add(1) + 1 == kRingers * kItems) doorbell.ring();  // the others shall see the end
          continue;
        }
        if (taken.load() == kRingers * kItems) return;
        (void)doorbell.wait(ticket, -1, i == 0 ? 5 : 0);  // a lost ring hangs here
      }
    });
  }
  for (int i = 0; i < kRingers; ++i) {
    threads.emplace_back([&] {
      for (int item = 0; item < kItems; ++item) {
        available.fetch_add(1, std::memory_order_relaxed);
        doorbell.ring();
        if (item % 8 == 0) std::this_thread::yield();  // let the sleepers run dry
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(taken.load() == kRingers * kItems);
  CHECK(available.load() == 0);
  CHECK(doorbell.sleepers.load() == 0);
}

TEST_CASE("two threads that play ping-pong see what the other wrote before it rang") {
  constexpr int kRounds = 2000;
  Doorbell bells[2];
  std::array<int, 64> ball{};  // not atomic: ThreadSanitizer would see a missing order
  const auto play = [&](int me) {
    std::uint32_t heard = 0;
    for (int round = 0; round < kRounds; ++round) {
      if (me == 0) {
        for (int& part : ball) part = round;
        bells[1].ring();
      }
      while (bells[me].ticket() == heard) (void)bells[me].wait(heard, -1, round % 2 == 0 ? 20 : 0);
      ++heard;
      if (me == 1) {
        for (int& part : ball) {
          if (part != round) FAIL_CHECK("old data");
          part = -round;
        }
        bells[0].ring();
      } else {
        for (const int part : ball) {
          if (part != -round) FAIL_CHECK("old data");
        }
      }
    }
  };
  std::thread other(play, 1);
  play(0);
  other.join();
  CHECK(bells[0].ticket() == kRounds);
}

TEST_CASE("doorbells in zeroed shared memory wake another process") {
  constexpr std::uint32_t kRounds = 200;
  Shared* const shared = map_shared();
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    for (std::uint32_t round = 0; round < kRounds; ++round) {
      while (shared->to_child.ticket() == round) (void)shared->to_child.wait(round, 10'000);
      shared->value.store(shared->value.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
      shared->to_parent.ring();
    }
    ::_exit(0);
  }
  for (std::uint32_t round = 0; round < kRounds; ++round) {
    shared->value.store(2 * round, std::memory_order_relaxed);
    shared->to_child.ring();
    while (shared->to_parent.ticket() == round) REQUIRE(shared->to_parent.wait(round, 10'000));
    CHECK(shared->value.load(std::memory_order_relaxed) == 2 * round + 1);
  }
  int status = -1;
  CHECK(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  ::munmap(shared, sizeof(Shared));
}

TEST_CASE("a sleeper that was killed does not keep others from being woken") {
  Shared* const shared = map_shared();
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    for (;;) (void)shared->to_child.wait(shared->to_child.ticket(), 10'000);
  }
  await_sleepers(shared->to_child, 1);
  ::kill(child, SIGKILL);
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child);
  CHECK(WIFSIGNALED(status));
  const auto ticket = shared->to_child.ticket();
  std::thread sleeper([&] {
    while (!shared->to_child.wait(ticket, 10'000)) {
    }
  });
  await_sleepers(shared->to_child, 2);  // the dead one is still counted
  shared->to_child.ring();
  sleeper.join();
  CHECK(shared->to_child.sleepers.load() == 1);
  ::munmap(shared, sizeof(Shared));
}
