// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "sched/task.hpp"

using commlib::Completion;
using commlib::CompletionQueue;
using commlib::Errc;
using commlib::FinishedList;
using commlib::Operation;

TEST_CASE("completion: whoever subscribes or waits while it completes hears of it, once") {
  for (int round = 0; round < 300; ++round) {
    Completion completion;
    const auto queue = std::make_shared<CompletionQueue>();
    std::atomic<int> ready{0};
    const auto at_once = [&](auto what) {
      return std::thread([&, what] {
        ++ready;
        while (ready.load() < 5) std::this_thread::yield();
        what();
      });
    };
    std::vector<std::thread> threads;
    threads.push_back(at_once([&] { completion.complete({Errc::kPeerLost, 3}); }));
    for (const std::uint64_t token : {11u, 12u}) {
      threads.push_back(at_once([&, token] { completion.subscribe(queue, token); }));
    }
    for (int waiter = 0; waiter < 2; ++waiter) {
      threads.push_back(at_once([&] {
        while (!completion.wait(-1)) {
        }
        CHECK(completion.failure().member == 3);
      }));
    }
    for (auto& thread : threads) thread.join();
    completion.subscribe(queue, 13);
    std::vector<std::uint64_t> tokens;
    queue->tokens.drain(&tokens);
    std::sort(tokens.begin(), tokens.end());
    CHECK(tokens == std::vector<std::uint64_t>{11, 12, 13});
  }
}

TEST_CASE("finished list: what several threads push is reaped by several, each of it once") {
  constexpr int kPushers = 2;
  constexpr std::uint64_t kEach = 2000;
  FinishedList list;
  std::vector<std::atomic<int>> reaped(kPushers * kEach);
  std::atomic<int> pushing{kPushers};
  std::vector<std::weak_ptr<Operation>> pushed(kPushers * kEach);
  const auto reap = [&] {
    while (const std::shared_ptr<Operation> operation = list.take()) ++reaped[operation->count];
  };
  std::vector<std::thread> threads;
  for (int pusher = 0; pusher < kPushers; ++pusher) {
    threads.emplace_back([&, pusher] {
      for (std::uint64_t i = 0; i < kEach; ++i) {
        const auto operation = std::make_shared<Operation>();
        operation->count = static_cast<std::uint64_t>(pusher) * kEach + i;
        operation->self = operation;
        pushed[operation->count] = operation;
        list.push(operation.get());
      }
      --pushing;
    });
    threads.emplace_back([&] {
      while (pushing.load() != 0) reap();
    });
  }
  for (auto& thread : threads) thread.join();
  reap();
  for (const auto& times : reaped) CHECK(times.load() == 1);
  for (const auto& operation : pushed) CHECK(operation.expired());
}
