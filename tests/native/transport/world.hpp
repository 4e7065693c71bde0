// SPDX-License-Identifier: Apache-2.0
// Some endpoints that are connected to each other, each with a TestSink, run by hand as their loops would run them:
// do_work while it moves something, then not before the descriptor is readable. So a transport that forgets to say that
// it has something to do hangs here, and is found out.
#pragma once

#include <doctest/doctest.h>
#include <poll.h>

#include <functional>
#include <memory>
#include <vector>

#include "base/clock.hpp"
#include "test_sink.hpp"

namespace commlib::test {

constexpr int kPatienceMs = 20'000;  // a test that has got nowhere for so long has failed
constexpr int kLimitMs = 60'000;     // … or for so long has not arrived
constexpr int kQuietMs = 30;         // nothing has moved for so long: nothing will

inline bool is_readable(int descriptor, int timeout_ms = 0) {
  pollfd poll_fd{descriptor, POLLIN, 0};
  return ::poll(&poll_fd, 1, timeout_ms) == 1;
}

class World {
 public:
  explicit World(PeerId endpoints) : busy_(endpoints, 1), held_(endpoints, 0) {
    for (PeerId id = 0; id < endpoints; ++id) sinks_.push_back(std::make_unique<TestSink>(id));
  }
  virtual ~World() = default;
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  [[nodiscard]] virtual Transport& at(PeerId id) = 0;
  virtual void pass_ms(int ms) = 0;  // let that much time go by on the transport's clock

  [[nodiscard]] TestSink& sink(PeerId id) { return *sinks_[id]; }
  [[nodiscard]] PeerId size() const { return static_cast<PeerId>(sinks_.size()); }

  std::uint64_t send(PeerId from, PeerId to, std::uint32_t payload_bytes, std::int32_t priority = 0) {
    const std::uint64_t number = sink(from).queue(to, payload_bytes, priority);
    at(from).notify(to);
    return number;
  }

  int step(PeerId id) {
    sink(id).may_call = true;
    const int moved = at(id).do_work();
    sink(id).may_call = false;
    return moved;
  }

  // A held endpoint is not run, as if its process were stopped.
  void hold(PeerId id, bool held = true) { held_[id] = held; }

  // Runs all that are not held until `done`. False if it never comes.
  bool run_until(const std::function<bool()>& done) { return run(done, kPatienceMs); }

  // Runs all that are not held until nothing moves any more.
  void run_until_quiet() {
    run([] { return false; }, kQuietMs);
  }

  // The death of a process: all its descriptors are closed and nobody has said anything.
  void kill(PeerId id) {
    at(id).close();
    sink(id).is_sealed = true;
    hold(id);
  }

  // Every test ends with this.
  void check_contract() {
    for (auto& sink : sinks_) {
      CHECK(sink->violations.size() == 0);
      if (!sink->violations.empty()) FAIL_CHECK(sink->violations.front());
    }
  }

  // What `to` has received from `from` is exactly its first `count` frames, in any order.
  bool has_all(PeerId to, PeerId from, std::size_t count) {
    std::vector<std::uint64_t> numbers = sink(to).received(from);
    if (numbers.size() != count) return false;
    std::vector<char> seen(count + 1);
    for (const std::uint64_t number : numbers) {
      if (number == 0 || number > count || seen[number]) return false;
      seen[number] = 1;
    }
    return true;
  }

  // The same, in the order of sending.
  bool has_all_in_order(PeerId to, PeerId from, std::size_t count) {
    const std::vector<std::uint64_t>& numbers = sink(to).received(from);
    for (std::size_t i = 0; i < numbers.size(); ++i)
      if (numbers[i] != i + 1) return false;
    return numbers.size() == count;
  }

 private:
  bool run(const std::function<bool()>& done, int patience_ms) {
    const std::int64_t end_ms = now_ms() + kLimitMs;
    std::int64_t last_move_ms = now_ms();
    int idle_rounds = 0;
    while (!done()) {
      if (now_ms() > end_ms) return false;
      bool moved = false;
      bool woken = false;
      std::vector<pollfd> sleepers;
      for (PeerId id = 0; id < size(); ++id) {
        if (held_[id]) continue;
        const int descriptor = at(id).descriptor();
        if (!busy_[id] && descriptor >= 0 && !is_readable(descriptor)) {
          sleepers.push_back({descriptor, POLLIN, 0});
          continue;
        }
        busy_[id] = step(id) > 0;
        moved = moved || busy_[id];
        woken = woken || descriptor >= 0;
      }
      if (moved) {
        last_move_ms = now_ms();
        idle_rounds = 0;
        continue;
      }
      const auto left = static_cast<int>(last_move_ms + patience_ms - now_ms());
      if (left <= 0) return done();
      if (woken) continue;
      if (sleepers.empty() && ++idle_rounds > 1000) return done();  // a loopback: it has no time to wait for
      if (!sleepers.empty()) ::poll(sleepers.data(), sleepers.size(), left);
    }
    return true;
  }

  std::vector<std::unique_ptr<TestSink>> sinks_;
  std::vector<char> busy_;
  std::vector<char> held_;
};

}  // namespace commlib::test
