// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <thread>

#include "commlib/job.hpp"

namespace commlib::test {

namespace {

constexpr int kTimeoutMs = 20'000;

// One tensor of one rank, in ordinary memory or in the arena.
struct Tensor {
  std::vector<std::byte> ordinary;
  std::byte* data = nullptr;
  std::uint64_t count = 0;
};

template <typename T>
void fill(Tensor& tensor, std::uint32_t rank, std::uint64_t salt) {
  auto* values = reinterpret_cast<T*>(tensor.data);
  for (std::uint64_t i = 0; i < tensor.count; ++i) values[i] = static_cast<T>((i * 7 + rank * 31 + salt * 13) % 61);
}

template <typename T>
std::uint64_t wrong_sums(const Tensor& tensor, std::uint32_t ranks, std::uint64_t salt) {
  const auto* values = reinterpret_cast<const T*>(tensor.data);
  std::uint64_t wrong = 0;
  for (std::uint64_t i = 0; i < tensor.count; ++i) {
    double sum = 0;
    for (std::uint32_t rank = 0; rank < ranks; ++rank) sum += static_cast<double>((i * 7 + rank * 31 + salt * 13) % 61);
    if (static_cast<double>(values[i]) != sum) ++wrong;
  }
  return wrong;
}

Tensor make(Worker& worker, std::uint64_t count, std::size_t item, bool in_arena) {
  Tensor tensor;
  tensor.count = count;
  if (in_arena) {
    tensor.data = static_cast<std::byte*>(worker.allocate(count * item));
    REQUIRE(tensor.data != nullptr);
  } else {
    tensor.ordinary.resize(count * item + 8);
    tensor.data = tensor.ordinary.data();
  }
  return tensor;
}

Request request_of(const std::shared_ptr<KeyRecord>& key, const Tensor& tensor, DType dtype, Driver driver) {
  Request request;
  request.key = key;
  request.hash = tensor.count * 16 + static_cast<std::uint64_t>(dtype);
  request.dtype = dtype;
  request.input = tensor.data;
  request.output = tensor.data;
  request.count = tensor.count;
  request.driver = driver;
  return request;
}

std::shared_ptr<Operation> submit(Worker& worker, const Request& request) {
  REQUIRE(request.key->try_take());
  std::shared_ptr<Operation> operation;
  REQUIRE(worker.submit(request, &operation) == Errc::kOk);
  return operation;
}

void reap_all(Worker& worker) {
  while (worker.reap() != nullptr) {
  }
}

// All ranks, each on its thread, sum tensors of these sizes for some rounds in place, carried out by whom it may be.
void sum_everywhere(const JobOptions& options, const std::vector<std::uint64_t>& counts, int rounds, Driver driver,
                    bool mixed_memory) {
  Job job(options);
  std::vector<Job::Name> names;
  for (std::size_t i = 0; i < counts.size(); ++i) names.push_back(job.declare("t" + std::to_string(i), counts[i] * 4));
  std::atomic<std::uint64_t> wrong{0};
  std::atomic<int> unfinished{0};
  std::vector<std::thread> ranks;
  for (std::uint32_t rank = 0; rank < job.size(); ++rank) {
    ranks.emplace_back([&, rank] {
      Worker& worker = job.worker(rank);
      std::vector<std::shared_ptr<KeyRecord>> keys;
      std::vector<Tensor> tensors;
      for (std::size_t i = 0; i < counts.size(); ++i) {
        keys.push_back(Job::record(names[i]));
        tensors.push_back(make(worker, counts[i], 4, mixed_memory ? (i + rank) % 2 == 0 : true));
      }
      std::mt19937 random(rank + 1);
      for (int round = 0; round < rounds; ++round) {
        std::vector<std::size_t> order(counts.size());
        for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
        if (driver != Driver::kCaller) std::shuffle(order.begin(), order.end(), random);
        std::vector<std::shared_ptr<Operation>> operations;
        for (const std::size_t i : order) {
          fill<float>(tensors[i], rank, static_cast<std::uint64_t>(round));
          operations.push_back(submit(worker, request_of(keys[i], tensors[i], DType::kFloat32, driver)));
          if (driver == Driver::kCaller && !carry_out(worker, *operations.back(), kTimeoutMs)) ++unfinished;
        }
        for (const auto& operation : operations) {
          if (!carry_out(worker, *operation, kTimeoutMs)) ++unfinished;
          if (operation->completion.failure().code != Errc::kOk) ++unfinished;
        }
        for (const Tensor& tensor : tensors) {
          wrong += wrong_sums<float>(tensor, job.size(), static_cast<std::uint64_t>(round));
        }
        reap_all(worker);
      }
    });
  }
  for (std::thread& thread : ranks) thread.join();
  CHECK(unfinished == 0);
  CHECK(wrong == 0);
}

// What is in flight at a shutdown fails: as shut down, or, told the way the others are, because `leaver` has left.
bool is_broken_off(const Failure& failure, std::uint32_t leaver) {
  return failure.code == Errc::kShutDown || (failure.code == Errc::kPeerLost && failure.member == leaver);
}

const std::vector<std::uint64_t> kCounts = {0, 1, 3, 17, 1023, 16'384, 16'385, 100'003, 262'145};

}  // namespace

TEST_CASE("sums on one host are right, for every route, number of ranks and way of waiting") {
  for (const LocalRoute route : {LocalRoute::kAuto, LocalRoute::kCma, LocalRoute::kStaged}) {
    for (const std::uint32_t ranks : {1u, 2u, 3u, 4u}) {
      for (const Driver driver : {Driver::kLoop, Driver::kCaller, Driver::kLater}) {
        CAPTURE(static_cast<int>(route));
        CAPTURE(ranks);
        CAPTURE(static_cast<int>(driver));
        sum_everywhere({.ranks_per_host = {ranks}, .partition_bytes = 256 * 1024, .route = route}, kCounts,
                       1 + static_cast<int>(tried(2)), driver, true);
      }
    }
  }
}

TEST_CASE("sums over hosts are right, with unequal hosts, servers and streams") {
  const std::vector<std::vector<std::uint32_t>> shapes = {{1, 1}, {2, 2}, {1, 1, 1}, {1, 2, 1}};
  for (const auto& shape : shapes) {
    for (const std::uint32_t servers : {0u, 1u, 2u}) {
      CAPTURE(shape.size());
      CAPTURE(servers);
      sum_everywhere(
          {.ranks_per_host = shape, .servers = servers, .streams = 1 + servers, .partition_bytes = 256 * 1024}, kCounts,
          3, static_cast<Driver>(servers), true);
    }
  }
}

TEST_CASE("a job whose tensors are larger than all credit ends") {
  sum_everywhere({.ranks_per_host = {1, 2}, .servers = 1, .partition_bytes = 128 * 1024, .credit_bytes = 64 * 1024},
                 {500'000, 400'001, 300'000}, 2, Driver::kLoop, true);
}

TEST_CASE("ranks that wait in opposite orders do not deadlock") {
  for (const std::vector<std::uint32_t>& shape : {std::vector<std::uint32_t>{2}, {1, 1}, {2, 1}}) {
    JobOptions options{
        .ranks_per_host = shape, .partition_bytes = 64 * 1024, .credit_bytes = 64 * 1024, .route = LocalRoute::kStaged};
    Job job(options);
    constexpr std::uint64_t kCount = 300'000;
    std::vector<Job::Name> names;
    for (int i = 0; i < 6; ++i) names.push_back(job.declare("t" + std::to_string(i), kCount * 4));
    std::atomic<int> unfinished{0};
    std::vector<std::thread> ranks;
    for (std::uint32_t rank = 0; rank < job.size(); ++rank) {
      ranks.emplace_back([&, rank] {
        Worker& worker = job.worker(rank);
        std::vector<Tensor> tensors;
        std::vector<std::shared_ptr<Operation>> operations;
        std::vector<std::shared_ptr<KeyRecord>> keys;
        for (int i = 0; i < 6; ++i) {
          tensors.push_back(make(worker, kCount, 4, false));
          fill<float>(tensors.back(), rank, 0);
          keys.push_back(Job::record(names[static_cast<std::size_t>(i)]));
        }
        const auto start = [&](std::size_t i) {
          operations.push_back(submit(worker, request_of(keys[i], tensors[i], DType::kFloat32, Driver::kLoop)));
        };
        const bool six_first = rank % 2 == 1;
        if (six_first) {
          start(5);
          if (!carry_out(worker, *operations.back(), kTimeoutMs)) ++unfinished;
        }
        for (std::size_t i = 0; i < 5; ++i) start(i);
        if (!six_first) {
          start(5);
          if (!carry_out(worker, *operations.back(), kTimeoutMs)) ++unfinished;
        }
        for (const auto& operation : operations) {
          if (!carry_out(worker, *operation, kTimeoutMs)) ++unfinished;
        }
        for (const Tensor& tensor : tensors) unfinished += wrong_sums<float>(tensor, job.size(), 0) != 0 ? 1 : 0;
        reap_all(worker);
      });
    }
    for (std::thread& thread : ranks) thread.join();
    CHECK(unfinished == 0);
  }
}

TEST_CASE("ranks that disagree all get a mismatch, whatever their sizes, and the name stays usable") {
  for (const std::vector<std::uint32_t>& shape : {std::vector<std::uint32_t>{2}, {3}, {1, 1}, {2, 1}, {1, 2, 1}}) {
    for (const auto& [usual, odd] :
         {std::pair<std::uint64_t, std::uint64_t>{10, 11}, {10, 200'000}, {200'000, 10}, {200'000, 200'001}}) {
      CAPTURE(shape.size());
      CAPTURE(usual);
      CAPTURE(odd);
      Job job({.ranks_per_host = shape, .servers = shape.size() > 1 ? 1u : 0u, .partition_bytes = 128 * 1024});
      const Job::Name name = job.declare("t", 200'001 * 4);
      std::atomic<int> wrong{0};
      std::vector<std::thread> ranks;
      for (std::uint32_t rank = 0; rank < job.size(); ++rank) {
        ranks.emplace_back([&, rank, usual = usual, odd = odd] {
          Worker& worker = job.worker(rank);
          const auto key = Job::record(name);
          for (int round = 0; round < 6; ++round) {
            const bool disagree = round % 2 == 0;
            Tensor tensor = make(worker, disagree && rank == job.size() - 1 ? odd : usual, 4, round % 3 == 0);
            fill<float>(tensor, rank, static_cast<std::uint64_t>(round));
            const auto operation =
                submit(worker, request_of(key, tensor, DType::kFloat32, static_cast<Driver>(round % 3)));
            if (!carry_out(worker, *operation, kTimeoutMs)) {
              ++wrong;
              return;
            }
            const Errc expected = disagree ? Errc::kMismatch : Errc::kOk;
            if (operation->completion.failure().code != expected) ++wrong;
            if (!disagree && wrong_sums<float>(tensor, job.size(), static_cast<std::uint64_t>(round)) != 0) ++wrong;
            reap_all(worker);
          }
        });
      }
      for (std::thread& thread : ranks) thread.join();
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("a broadcast brings the root's bytes to all") {
  for (const std::vector<std::uint32_t>& shape : {std::vector<std::uint32_t>{1}, {3}, {1, 1}, {2, 2}, {1, 2, 1}}) {
    for (const std::uint64_t count : kCounts) {
      JobOptions options{.ranks_per_host = shape, .servers = 1, .partition_bytes = 128 * 1024};
      Job job(options);
      const Job::Name name = job.declare("b", count * 4);
      std::atomic<int> wrong{0};
      std::vector<std::thread> ranks;
      for (std::uint32_t rank = 0; rank < job.size(); ++rank) {
        ranks.emplace_back([&, rank] {
          Worker& worker = job.worker(rank);
          const auto key = Job::record(name);
          for (std::uint32_t root = 0; root < job.size(); ++root) {
            Tensor tensor = make(worker, count, 4, (rank + root) % 2 == 0);
            fill<float>(tensor, rank, root);
            Request request = request_of(key, tensor, DType::kFloat32, static_cast<Driver>(root % 3));
            request.collective = Collective::kBroadcast;
            request.root = root;
            const auto operation = submit(worker, request);
            if (!carry_out(worker, *operation, kTimeoutMs) || operation->completion.failure().code != Errc::kOk) {
              ++wrong;
              return;
            }
            Tensor expected = make(worker, count, 4, false);
            fill<float>(expected, root, root);
            if (count != 0 && std::memcmp(tensor.data, expected.data, count * 4) != 0) ++wrong;
            reap_all(worker);
          }
        });
      }
      for (std::thread& thread : ranks) thread.join();
      CHECK(wrong == 0);
    }
  }
}

// Host h adds 256^h a rank and round, so that each digit of a result says how much of that host is in it.
TEST_CASE("what hosts accumulate, each at its own pace, holds all of their own and nothing twice") {
  for (const std::vector<std::uint32_t>& shape : {std::vector<std::uint32_t>{1, 1}, {2, 1}, {1, 2, 1}, {2, 2}}) {
    for (const std::uint32_t servers : {0U, 1U}) {
      for (const std::uint64_t count :
           {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{300}, std::uint64_t{70'001}}) {
        CAPTURE(shape.size());
        CAPTURE(servers);
        CAPTURE(count);
        Job job({.ranks_per_host = shape, .servers = servers, .partition_bytes = 128 * 1024});
        const Job::Name name = job.declare("a", count * 8);
        std::vector<std::uint32_t> node_of_rank;
        for (std::uint32_t node = 0; node < shape.size(); ++node)
          node_of_rank.insert(node_of_rank.end(), shape[node], node);
        const auto rounds_of = [](std::uint32_t node) { return 3 + 2 * node; };
        const auto digit = [](double value, std::uint32_t node) {
          return static_cast<std::uint64_t>(value) >> (8 * node) & 255;
        };
        std::atomic<int> wrong{0};
        std::atomic<std::uint32_t> through{0};
        std::vector<std::thread> ranks;
        for (std::uint32_t rank = 0; rank < job.size(); ++rank) {
          ranks.emplace_back([&, rank] {
            const std::uint32_t node = node_of_rank[rank];
            Worker& worker = job.worker(rank);
            const auto key = Job::record(name);
            Tensor tensor = make(worker, count, 8, rank % 2 == 0);
            std::vector<double> seen(count);
            const auto add = [&](double mine, std::uint32_t round) {
              std::vector<double> values(count, mine);
              if (count != 0) std::memcpy(tensor.data, values.data(), count * 8);
              Request request = request_of(key, tensor, DType::kFloat64, static_cast<Driver>(round % 3));
              request.collective = Collective::kAccumulate;
              const auto operation = submit(worker, request);
              if (!carry_out(worker, *operation, kTimeoutMs) || operation->completion.failure().code != Errc::kOk) {
                ++wrong;
                return false;
              }
              reap_all(worker);
              if (count != 0) std::memcpy(values.data(), tensor.data, count * 8);
              for (std::uint64_t i = 0; i < count; ++i) {
                for (std::uint32_t other = 0; other < shape.size(); ++other) {
                  const std::uint64_t now = digit(values[i], other);
                  const std::uint64_t all = rounds_of(other) * shape[other];
                  if (now > all || now < digit(seen[i], other)) ++wrong;
                  if (other == node && now != std::min<std::uint64_t>(round, rounds_of(node)) * shape[node]) ++wrong;
                  if (round > rounds_of(node) && now != all) ++wrong;
                }
              }
              seen = values;
              return true;
            };
            const double mine = static_cast<double>(std::uint64_t{1} << (8 * node));
            for (std::uint32_t round = 1; round <= rounds_of(node); ++round) {
              if (!add(mine, round)) break;
            }
            through.fetch_add(1);
            while (through.load() < job.size()) std::this_thread::yield();
            (void)add(0, rounds_of(node) + 1);
          });
        }
        for (std::thread& thread : ranks) thread.join();
        CHECK(wrong == 0);
      }
    }
  }
}

TEST_CASE("an operation in flight when its worker shuts down completes once, with an error") {
  for (const std::vector<std::uint32_t>& shape : {std::vector<std::uint32_t>{2}, {1, 1}}) {
    Job job({.ranks_per_host = shape});
    const Job::Name name = job.declare("t", 4'000);
    const auto key0 = Job::record(name);
    const auto key1 = Job::record(name);
    Tensor tensor = make(job.worker(0), 1'000, 4, true);
    const auto operation = submit(job.worker(0), request_of(key0, tensor, DType::kFloat32, Driver::kLoop));
    CHECK_FALSE(carry_out(job.worker(0), *operation, 50));
    job.worker(0).shutdown(1'000);
    CHECK(carry_out(job.worker(0), *operation, 0));
    CHECK(is_broken_off(operation->completion.failure(), 0));
    REQUIRE(key0->try_take());
    std::shared_ptr<Operation> refused;
    CHECK(job.worker(0).submit(request_of(key0, tensor, DType::kFloat32, Driver::kLoop), &refused) == Errc::kShutDown);
    reap_all(job.worker(0));
  }
}

TEST_CASE("an operation that its caller never came to wait for completes at shutdown all the same") {
  Job job({.ranks_per_host = {2}});
  const Job::Name name = job.declare("t", 4'000);
  Tensor tensor = make(job.worker(0), 1'000, 4, true);
  const auto operation = submit(job.worker(0), request_of(Job::record(name), tensor, DType::kFloat32, Driver::kCaller));
  job.worker(0).shutdown(1'000);
  REQUIRE(operation->completion.done());
  CHECK(is_broken_off(operation->completion.failure(), 0));
  job.worker(0).hand_over(*operation);
  reap_all(job.worker(0));
}

TEST_CASE("what a rank that has left never submitted fails on the others, and names it") {
  for (const std::vector<std::uint32_t>& shape : {std::vector<std::uint32_t>{2}, {3}, {1, 1}, {2, 1}, {2, 2}}) {
    std::uint32_t size = 0;
    for (const std::uint32_t ranks : shape) size += ranks;
    for (std::uint32_t leaver = 0; leaver < size; ++leaver) {
      for (const bool before : {false, true}) {
        CAPTURE(shape.size());
        CAPTURE(leaver);
        CAPTURE(before);
        Job job({.ranks_per_host = shape});
        const Job::Name name = job.declare("t", 4'000);
        std::vector<std::shared_ptr<Operation>> operations(size);
        std::vector<Tensor> tensors(size);
        if (before) job.worker(leaver).shutdown(2'000);
        for (std::uint32_t rank = 0; rank < size; ++rank) {
          if (rank == leaver) continue;
          tensors[rank] = make(job.worker(rank), 1'000, 4, true);
          operations[rank] =
              submit(job.worker(rank), request_of(Job::record(name), tensors[rank], DType::kFloat32, Driver::kLoop));
        }
        if (!before) job.worker(leaver).shutdown(2'000);
        for (std::uint32_t rank = 0; rank < size; ++rank) {
          if (rank == leaver) continue;
          REQUIRE(carry_out(job.worker(rank), *operations[rank], kTimeoutMs));
          CHECK(operations[rank]->completion.failure().code == Errc::kPeerLost);
          CHECK(operations[rank]->completion.failure().member == leaver);
          reap_all(job.worker(rank));
        }
      }
    }
  }
}

TEST_CASE("of several that have left, one because of the other, the one with whom it began is named") {
  for (const std::vector<std::uint32_t>& shape : {std::vector<std::uint32_t>{3}, {1, 1, 1}, {2, 1}, {1, 2}, {2, 2}}) {
    std::uint32_t size = 0;
    for (const std::uint32_t ranks : shape) size += ranks;
    for (std::uint32_t first = 0; first < size; ++first) {
      CAPTURE(shape.size());
      CAPTURE(first);
      Job job({.ranks_per_host = shape});
      job.worker(first).shutdown(2'000);
      // All others find out. Another one leaves, and the rest find several gone.
      for (std::uint32_t gone = 1; gone < size; ++gone) {
        const Job::Name name = job.declare("t" + std::to_string(gone), 4'000);
        std::vector<std::shared_ptr<Operation>> operations(size);
        std::vector<Tensor> tensors(size);
        const auto rest = [&](auto act) {
          for (std::uint32_t step = gone; step < size; ++step) act((first + size - step) % size);
        };
        rest([&](std::uint32_t rank) {
          tensors[rank] = make(job.worker(rank), 1'000, 4, true);
          operations[rank] =
              submit(job.worker(rank), request_of(Job::record(name), tensors[rank], DType::kFloat32, Driver::kLoop));
        });
        rest([&](std::uint32_t rank) {
          REQUIRE(carry_out(job.worker(rank), *operations[rank], kTimeoutMs));
          CHECK(operations[rank]->completion.failure().code == Errc::kPeerLost);
          CHECK(operations[rank]->completion.failure().member == first);
          reap_all(job.worker(rank));
        });
        job.worker((first + size - gone) % size).shutdown(2'000);
      }
    }
  }
}

TEST_CASE("who leaves because another has left says so, and is believed") {
  const auto frames_from = [](const Fd& socket) {
    std::vector<Frame> frames;
    for (Frame frame; ::recv(socket.get(), &frame, sizeof frame, MSG_WAITALL) == sizeof frame;) {
      REQUIRE(frame.payload_bytes == 0);
      frames.push_back(frame);
    }
    return frames;
  };
  const auto fails_for = [](Job& job, std::uint32_t rank) {
    const Job::Name name = job.declare("t", 4'000);
    Tensor tensor = make(job.worker(rank), 1'000, 4, true);
    const auto operation =
        submit(job.worker(rank), request_of(Job::record(name), tensor, DType::kFloat32, Driver::kLoop));
    REQUIRE(carry_out(job.worker(rank), *operation, kTimeoutMs));
    REQUIRE(operation->completion.failure().code == Errc::kPeerLost);
    reap_all(job.worker(rank));
    return operation->completion.failure().member;
  };
  {
    Job job({.ranks_per_host = {1, 1, 1}, .last_host_is_raw = true});
    job.worker(1).shutdown(100);
    CHECK(fails_for(job, 0) == 1);
    job.worker(0).shutdown(100);
    const std::vector<Frame> said = frames_from(job.raw()[0][0]);
    REQUIRE(said.size() >= 2);
    CHECK(said.back().kind == FrameKind::kBye);
    CHECK(said[said.size() - 2].kind == FrameKind::kLeft);
    CHECK(said[said.size() - 2].member == 1);
  }
  {
    Job job({.ranks_per_host = {1, 1, 1}, .last_host_is_raw = true});
    for (const FrameKind kind : {FrameKind::kLeft, FrameKind::kBye}) {
      Frame frame;
      frame.kind = kind;
      frame.member = 1;  // who is still there
      REQUIRE(::send(job.raw()[0][0].get(), &frame, sizeof frame, 0) == sizeof frame);
    }
    job.raw()[0][0].reset();
    CHECK(fails_for(job, 0) == 1);
  }
}

TEST_CASE("a rank that breaks off what it has submitted ends the job for all") {
  for (const std::vector<std::uint32_t>& shape : {std::vector<std::uint32_t>{2}, {3}, {1, 1}, {2, 1}, {2, 2}}) {
    std::uint32_t size = 0;
    for (const std::uint32_t ranks : shape) size += ranks;
    for (std::uint32_t test = 0; test < 2 * size; ++test) {
      const std::uint32_t leaver = test / 2;
      const bool all_arrive = test % 2 == 1;  // then it may be completed in time
      CAPTURE(shape.size());
      CAPTURE(leaver);
      CAPTURE(all_arrive);
      Job job({.ranks_per_host = shape, .partition_bytes = 64 * 1024});
      const Job::Name name = job.declare("t", 400'000);
      std::vector<std::shared_ptr<Operation>> operations(size);
      std::vector<Tensor> tensors(size);
      const auto start = [&](std::uint32_t rank) {
        tensors[rank] = make(job.worker(rank), 100'000, 4, rank % 2 == 0);
        Request request = request_of(Job::record(name), tensors[rank], DType::kFloat32, Driver::kLoop);
        REQUIRE(request.key->try_take());
        const Errc code = job.worker(rank).submit(request, &operations[rank]);
        if (code != Errc::kOk) CHECK(code == Errc::kPeerLost);
      };
      start(leaver);
      const std::uint32_t late = leaver == size - 1 ? 0 : size - 1;
      for (std::uint32_t rank = 0; rank < size; ++rank) {
        if (rank != leaver && rank != late) start(rank);
      }
      if (all_arrive) start(late);
      job.worker(leaver).shutdown(2'000);
      if (!all_arrive) start(late);
      for (std::uint32_t rank = 0; rank < size; ++rank) {
        if (operations[rank] == nullptr) continue;  // it was told when it submitted
        REQUIRE(carry_out(job.worker(rank), *operations[rank], kTimeoutMs));
        const Failure failure = operations[rank]->completion.failure();
        CHECK((is_broken_off(failure, leaver) || (all_arrive && failure.code == Errc::kOk)));
        reap_all(job.worker(rank));
      }
    }
  }
}

TEST_CASE("an abort reaches every rank of every host, waiting or not") {
  for (const std::vector<std::uint32_t>& shape : {std::vector<std::uint32_t>{3}, {1, 1}, {2, 2}}) {
    Job job({.ranks_per_host = shape, .servers = 1});
    const Job::Name name = job.declare("t", 4'000'000);
    std::vector<std::shared_ptr<Operation>> operations;
    std::vector<Tensor> tensors(job.size());
    for (std::uint32_t rank = 1; rank < job.size(); ++rank) {
      tensors[rank] = make(job.worker(rank), 1'000'000, 4, rank % 2 == 0);
      operations.push_back(
          submit(job.worker(rank), request_of(Job::record(name), tensors[rank], DType::kFloat32, Driver::kLoop)));
    }
    job.worker(0).abort(0, 1);
    for (std::uint32_t rank = 1; rank < job.size(); ++rank) {
      REQUIRE(carry_out(job.worker(rank), *operations[rank - 1], kTimeoutMs));
      CHECK(operations[rank - 1]->completion.failure().code == Errc::kPeerLost);
      CHECK(operations[rank - 1]->completion.failure().member == 0);
      reap_all(job.worker(rank));
      const auto key = Job::record(job.declare("later", 4));
      REQUIRE(key->try_take());
      std::shared_ptr<Operation> refused;
      CHECK(job.worker(rank).submit(request_of(key, tensors[rank], DType::kFloat32, Driver::kLoop), &refused) ==
            Errc::kPeerLost);
    }
  }
}

}  // namespace commlib::test
