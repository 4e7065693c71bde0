// SPDX-License-Identifier: Apache-2.0
// The whole core with its threads off: every loop is stepped by hand, in an order drawn from a seed, so that thousands of
// interleavings are tried and each can be tried again.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "commlib/job.hpp"

namespace commlib::test {

namespace {

using Random = std::mt19937_64;

struct Plan {
  JobOptions job;
  std::vector<std::uint64_t> counts;  // of the tensors
  int rounds = 2;
  bool disagree = false;  // the last rank says another count in odd rounds of tensor 0
  bool broadcast = false;
  bool abort = false;  // at some moment the job has failed, says one of the ranks
};

// One rank of the script: what it has submitted and what of it is over.
struct Rank {
  std::vector<std::shared_ptr<KeyRecord>> keys;
  std::vector<int> rounds_begun;
  std::vector<std::vector<std::int32_t>> buffers;   // by tensor
  std::vector<std::shared_ptr<Operation>> flights;  // by tensor; null: none
};

std::int32_t value(std::uint32_t rank, std::size_t tensor, int round, std::uint64_t index) {
  return static_cast<std::int32_t>((index * 31 + rank * 1009 + tensor * 77 + static_cast<std::uint64_t>(round) * 13) %
                                   100'003);
}

class Script {
 public:
  Script(const Plan& plan, std::uint64_t seed) : plan_(plan), random_(seed), job_(plan.job), ranks_(job_.size()) {
    std::uint64_t largest = 0;
    for (const std::uint64_t count : plan.counts) largest = std::max(largest, count + 50'000);
    for (std::size_t tensor = 0; tensor < plan.counts.size(); ++tensor) {
      const Job::Name name = job_.declare("t" + std::to_string(tensor), largest * 4);
      for (Rank& rank : ranks_) rank.keys.push_back(Job::record(name));
    }
    for (Rank& rank : ranks_) {
      rank.rounds_begun.assign(plan.counts.size(), 0);
      rank.buffers.resize(plan.counts.size());
      rank.flights.resize(plan.counts.size());
    }
  }

  // Runs to the end; false if it has not got there after very many steps.
  bool run() {
    auto loops = job_.loops();
    const std::size_t goal = ranks_.size() * plan_.counts.size() * static_cast<std::size_t>(plan_.rounds);
    const int end = static_cast<int>(random_() % 4'000);
    for (int step = 0; step < 400'000 && finished_ < goal; ++step) {
      if (plan_.abort && step == end) {
        aborted_ = true;
        job_.worker(random_() % job_.size()).abort(0, static_cast<int>(Cause::kUnknown));
      }
      if (random_() % 8 == 0) {
        advance(random_() % ranks_.size(), random_() % plan_.counts.size());
      } else {
        (void)loops[random_() % loops.size()]();
      }
    }
    return finished_ == goal;
  }

  int wrong() const noexcept { return wrong_; }

 private:
  bool disagrees(std::size_t tensor, int round) const { return plan_.disagree && tensor == 0 && round % 2 == 1; }

  void advance(std::size_t index, std::size_t tensor) {
    Rank& rank = ranks_[index];
    Worker& worker = job_.worker(static_cast<std::uint32_t>(index));
    if (auto& flight = rank.flights[tensor]; flight != nullptr) {
      // Looked at; or, now and then, begun to be waited for and given up.
      if (random_() % 4 == 0 && worker.take(*flight)) worker.hand_over(*flight);
      if (!worker.poll(*flight)) return;
      check(index, tensor, rank.rounds_begun[tensor], *flight);
      flight = nullptr;
      while (worker.reap() != nullptr) {
      }
      ++finished_;
      return;
    }
    if (rank.rounds_begun[tensor] == plan_.rounds) return;
    if (worker.aborted()) {
      ++rank.rounds_begun[tensor];
      ++finished_;
      return;
    }
    const int round = ++rank.rounds_begun[tensor];
    std::uint64_t count = plan_.counts[tensor];
    if (disagrees(tensor, round) && index + 1 == ranks_.size()) count += round % 4 == 1 ? 1 : 50'000;
    auto& buffer = rank.buffers[tensor];
    buffer.resize(count);
    for (std::uint64_t i = 0; i < count; ++i) buffer[i] = value(static_cast<std::uint32_t>(index), tensor, round, i);
    Request request;
    request.key = rank.keys[tensor];
    request.hash = count;
    request.dtype = DType::kInt32;
    request.input = request.output = buffer.data();
    request.count = count;
    request.priority = static_cast<std::int32_t>(random_() % 3);
    request.driver = random_() % 2 == 0 ? Driver::kLoop : Driver::kLater;
    if (plan_.broadcast) {
      request.collective = Collective::kBroadcast;
      request.root = static_cast<std::uint32_t>(round) % job_.size();
    }
    REQUIRE(request.key->try_take());
    const Errc code = worker.submit(request, &rank.flights[tensor]);
    REQUIRE((code == Errc::kOk || (aborted_ && code == Errc::kPeerLost)));
    if (code == Errc::kOk) return;
    request.key->give_back();
    ++finished_;
  }

  void check(std::size_t index, std::size_t tensor, int round, const Operation& operation) {
    const Errc code = operation.completion.failure().code;
    if (aborted_ && code == Errc::kPeerLost) {
      // Nobody looks at its memory any more.
      ranks_[index].buffers[tensor] = {};
      return;
    }
    if (code != (disagrees(tensor, round) ? Errc::kMismatch : Errc::kOk)) ++wrong_;
    if (code != Errc::kOk) return;
    const auto& buffer = ranks_[index].buffers[tensor];
    for (std::uint64_t i = 0; i < buffer.size(); ++i) {
      std::uint32_t expected = 0;
      for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
        if (!plan_.broadcast || rank == static_cast<std::uint32_t>(round) % ranks_.size()) {
          expected += static_cast<std::uint32_t>(value(rank, tensor, round, i));
        }
      }
      if (static_cast<std::uint32_t>(buffer[i]) != expected) {
        ++wrong_;
        return;
      }
    }
  }

  Plan plan_;
  Random random_;
  Job job_;
  std::vector<Rank> ranks_;
  std::size_t finished_ = 0;
  int wrong_ = 0;
  bool aborted_ = false;
};

void explore(const Plan& plan, std::uint64_t seeds) {
#if defined(__SANITIZE_THREAD__)
  seeds = 3;  // there is one thread here
#endif
  for (std::uint64_t seed = 1; seed <= tried(seeds); ++seed) {
    CAPTURE(seed);
    Script script(plan, seed);
    const bool ended = script.run();
    CHECK(ended);
    CHECK(script.wrong() == 0);
    if (!ended || script.wrong() != 0) return;
  }
}

JobOptions hosts(std::vector<std::uint32_t> ranks_per_host, std::uint32_t servers,
                 LocalRoute route = LocalRoute::kAuto) {
  return {.ranks_per_host = std::move(ranks_per_host),
          .servers = servers,
          .streams = 1 + servers % 2,
          .partition_bytes = 64 * 1024,
          .credit_bytes = 96 * 1024,
          .route = route,
          .arena_bytes = 64 << 20,
          .threads = false};
}

const std::vector<std::uint64_t> kMixed = {1, 17, 0, 20'000, 40'001, 5};

}  // namespace

TEST_CASE("whatever the order of steps, sums on one host end and are right") {
  for (const LocalRoute route : {LocalRoute::kAuto, LocalRoute::kCma, LocalRoute::kStaged}) {
    explore({.job = hosts({3}, 0, route), .counts = kMixed, .rounds = 3}, 25);
  }
}

TEST_CASE("whatever the order of steps, sums over hosts end and are right") {
  explore({.job = hosts({1, 1}, 0), .counts = kMixed, .rounds = 3}, 20);
  explore({.job = hosts({2, 1}, 1), .counts = kMixed, .rounds = 3}, 20);
  explore({.job = hosts({1, 2, 1}, 2, LocalRoute::kStaged), .counts = kMixed, .rounds = 2}, 15);
}

TEST_CASE("whatever the order of steps, a disagreement reaches all, and only its own round") {
  explore({.job = hosts({3}, 0), .counts = {30'000, 9, 20'000}, .rounds = 4, .disagree = true}, 25);
  explore({.job = hosts({1, 1}, 1), .counts = {30'000, 9, 20'000}, .rounds = 4, .disagree = true}, 25);
  explore({.job = hosts({2, 2}, 0), .counts = {30'000, 9, 20'000}, .rounds = 4, .disagree = true}, 25);
  explore({.job = hosts({2, 1}, 1), .counts = {9, 20'000}, .rounds = 4, .disagree = true}, 25);
}

TEST_CASE("whatever the order of steps, and whenever the job fails, all ends and nothing is touched afterwards") {
  for (const LocalRoute route : {LocalRoute::kCma, LocalRoute::kStaged}) {
    explore({.job = hosts({3}, 0, route), .counts = kMixed, .rounds = 3, .abort = true}, 30);
    explore({.job = hosts({2, 2}, 0, route), .counts = kMixed, .rounds = 3, .abort = true}, 50);
    explore({.job = hosts({2, 1}, 1, route), .counts = kMixed, .rounds = 3, .abort = true}, 50);
  }
}

TEST_CASE("whatever the order of steps, broadcasts end and are right") {
  explore({.job = hosts({3}, 0), .counts = kMixed, .rounds = 3, .broadcast = true}, 20);
  explore({.job = hosts({2, 1}, 1), .counts = kMixed, .rounds = 3, .broadcast = true}, 20);
}

}  // namespace commlib::test
