// SPDX-License-Identifier: Apache-2.0
// Operations to be counted from outside, by tests/performance: whole jobs in this one thread, with buffers in arenas. Of each
// case some operations come first, so that what happens only once has happened; those that count are between two calls of
// getsid, which nothing else here calls, and which Callgrind and strace both see. One line a case, at the end:
//
//   <name of the case>\t<operations that count>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <vector>

#include "commlib/job.hpp"

namespace {

using commlib::Driver;
using commlib::test::Job;
using commlib::test::JobOptions;

constexpr std::uint64_t kKiB = 1 << 10, kMiB = 1 << 20;
constexpr int kWarmUp = 5;
constexpr int kMostSteps = 10'000;  // of one operation, each of all loops

struct Case {
  const char* name;
  JobOptions job;
  std::uint64_t bytes;
  Driver driver;
  int operations;
};

JobOptions job_of(std::vector<std::uint32_t> ranks_per_host, std::uint32_t servers = 0) {
  return {.ranks_per_host = std::move(ranks_per_host), .servers = servers, .arena_bytes = 64 << 20, .threads = false};
}

// Averages of float32, in place. Rank r begins with r + 1 everywhere; after the first all have the mean, and keep it.
class Averages {
 public:
  explicit Averages(const Case& one) : case_(one), job_(one.job), loops_(job_.loops()), flights_(job_.size()) {
    const Job::Name name = job_.declare("t", one.bytes);
    for (std::uint32_t rank = 0; rank < job_.size(); ++rank) {
      auto* const buffer = static_cast<float*>(job_.worker(rank).allocate(one.bytes));
      std::fill_n(buffer, count(), static_cast<float>(rank + 1));
      buffers_.push_back(buffer);
      keys_.push_back(Job::record(name));
    }
  }

  // One operation of all ranks, to its end.
  [[nodiscard]] bool once() {
    for (std::uint32_t rank = 0; rank < job_.size(); ++rank) {
      commlib::Request request;
      request.key = keys_[rank];
      request.op = commlib::ReduceOp::kAverage;
      request.input = request.output = buffers_[rank];
      request.count = count();
      request.driver = case_.driver;
      if (!request.key->try_take()) return false;
      if (job_.worker(rank).submit(request, &flights_[rank]) != commlib::Errc::kOk) return false;
    }
    for (int step = 0; !all_done(); ++step) {
      if (step == kMostSteps) return false;
      if (case_.job.ranks_per_host.size() == 1) continue;  // the ranks do it themselves
      for (auto& loop : loops_) (void)loop();
    }
    for (std::uint32_t rank = 0; rank < job_.size(); ++rank) {
      while (job_.worker(rank).reap() != nullptr) {
      }
    }
    return true;
  }

  [[nodiscard]] bool is_right() const {
    const float mean = static_cast<float>(job_.size() + 1) / 2;
    return std::ranges::all_of(buffers_, [&](const float* buffer) {
      return std::all_of(buffer, buffer + count(), [&](float value) { return value == mean; });
    });
  }

 private:
  [[nodiscard]] std::uint64_t count() const noexcept { return case_.bytes / sizeof(float); }

  // As the binding does: looks first; the caller then does what there is to do.
  [[nodiscard]] bool is_done(std::uint32_t rank) {
    commlib::Operation& operation = *flights_[rank];
    if (case_.driver == Driver::kLater) return job_.worker(rank).poll(operation);
    return operation.completion.done() || (operation.is_callers && job_.worker(rank).drive(operation, 0));
  }
  [[nodiscard]] bool all_done() {
    std::uint32_t done = 0;
    for (std::uint32_t rank = 0; rank < job_.size(); ++rank) done += is_done(rank) ? 1 : 0;
    return done == job_.size();
  }

  const Case& case_;
  Job job_;
  std::vector<std::function<int()>> loops_;
  std::vector<std::shared_ptr<commlib::Operation>> flights_;
  std::vector<std::shared_ptr<commlib::KeyRecord>> keys_;
  std::vector<float*> buffers_;
};

[[nodiscard]] bool carry_out(const Case& one) {
  Averages averages(one);
  for (int i = 0; i < kWarmUp; ++i) {
    if (!averages.once()) return false;
  }
  (void)::getsid(0);
  bool is_over = true;
  for (int i = 0; i < one.operations && is_over; ++i) is_over = averages.once();
  (void)::getsid(0);
  return is_over && averages.is_right();
}

}  // namespace

int main() {
  const std::vector<Case> cases = {
      {"2 ranks, 4 KiB", job_of({2}), 4 * kKiB, Driver::kCaller, 500},
      {"2 ranks, 4 KiB, looked at later", job_of({2}), 4 * kKiB, Driver::kLater, 500},
      {"2 ranks, 1 MiB", job_of({2}), kMiB, Driver::kCaller, 20},
      {"2 hosts, 4 KiB", job_of({1, 1}), 4 * kKiB, Driver::kCaller, 200},
      {"2 hosts, 1 MiB", job_of({1, 1}), kMiB, Driver::kCaller, 20},
      {"3 hosts and a server, 1 MiB", job_of({1, 1, 1}, 1), kMiB, Driver::kCaller, 20},
  };
  for (const Case& one : cases) {
    if (carry_out(one)) continue;
    std::fprintf(stderr, "%s: not over, or wrong\n", one.name);
    return 1;
  }
  for (const Case& one : cases) std::printf("%s\t%d\n", one.name, one.operations);
}
