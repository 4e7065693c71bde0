// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <memory>
#include <thread>
#include <vector>

#include "base/ring.hpp"

using commlib::Inbox;
using commlib::SpscRing;

TEST_CASE("a ring holds as many as it says, refuses more, and leaves what it refused alone") {
  SpscRing<std::unique_ptr<int>> ring(3);
  REQUIRE(ring.capacity() == 4);
  for (int i = 0; i < 4; ++i) CHECK(ring.try_push(std::make_unique<int>(i)));
  auto refused = std::make_unique<int>(4);
  CHECK_FALSE(ring.try_push(std::move(refused)));
  REQUIRE(refused != nullptr);
  std::unique_ptr<int> got;
  REQUIRE(ring.try_pop(&got));
  CHECK(*got == 0);
  CHECK(ring.try_push(std::move(refused)));
  for (int i = 1; i < 5; ++i) {
    REQUIRE(ring.try_pop(&got));
    CHECK(*got == i);
  }
  CHECK_FALSE(ring.try_pop(&got));
}

TEST_CASE("a ring of one works, and so does one that was asked for none") {
  for (const std::size_t capacity : {0U, 1U}) {
    SpscRing<int> ring(capacity);
    int got = 0;
    for (int i = 0; i < 10; ++i) {
      CHECK(ring.try_push(int{i}));
      CHECK_FALSE(ring.try_push(99));
      REQUIRE(ring.try_pop(&got));
      CHECK(got == i);
      CHECK_FALSE(ring.try_pop(&got));
    }
  }
}

TEST_CASE("a ring carries everything from one thread to another in order") {
  constexpr int kItems = 50'000;
  SpscRing<std::vector<int>> ring(16);  // vectors: ThreadSanitizer sees a slot that is read while it is written
  std::thread producer([&ring] {
    for (int i = 0; i < kItems; ++i) {
      std::vector<int> item{i, -i};
      while (!ring.try_push(std::move(item))) std::this_thread::yield();
    }
  });
  int wrong = 0;
  std::vector<int> item;
  for (int i = 0; i < kItems; ++i) {
    while (!ring.try_pop(&item)) std::this_thread::yield();
    if (item != std::vector<int>{i, -i}) ++wrong;
  }
  producer.join();
  CHECK(wrong == 0);
  CHECK_FALSE(ring.try_pop(&item));
}

TEST_CASE("an inbox gives everything at once, in order, and is empty then") {
  Inbox<std::unique_ptr<int>> inbox;
  std::vector<std::unique_ptr<int>> got;
  got.push_back(std::make_unique<int>(99));
  CHECK(inbox.is_empty());
  inbox.drain(&got);
  CHECK(got.empty());
  for (int i = 0; i < 5; ++i) inbox.push(std::make_unique<int>(i));
  CHECK_FALSE(inbox.is_empty());
  inbox.drain(&got);
  CHECK(inbox.is_empty());
  REQUIRE(got.size() == 5);
  for (int i = 0; i < 5; ++i) CHECK(*got[static_cast<std::size_t>(i)] == i);
  inbox.drain(&got);
  CHECK(got.empty());
}

TEST_CASE("an inbox loses nothing of what many threads push, and keeps the order of each") {
  constexpr int kThreads = 4;
  constexpr int kItems = 5000;
  Inbox<int> inbox;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&inbox, i] {
      for (int j = 0; j < kItems; ++j) inbox.push(i * kItems + j);
    });
  }
  std::vector<int> next(kThreads, 0);
  std::vector<int> got;
  int taken = 0;
  while (taken < kThreads * kItems) {
    inbox.drain(&got);
    if (got.empty()) std::this_thread::yield();
    for (const int item : got) {
      REQUIRE(item % kItems == next[static_cast<std::size_t>(item / kItems)]++);
      ++taken;
    }
  }
  for (auto& thread : threads) thread.join();
  CHECK(inbox.is_empty());
}
