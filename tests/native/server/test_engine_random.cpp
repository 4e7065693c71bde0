// SPDX-License-Identifier: Apache-2.0
// Whole jobs with every node's engine, frames in random order: results against long double, the same bits whatever the
// order, and nothing left over.
#include <doctest/doctest.h>

#include <vector>

#include "job.hpp"

using commlib::Collective;
using commlib::DType;
using commlib::Errc;
using commlib::ReduceOp;
using commlib::test::tried;
using job::Frame;
using job::Job;
using job::JobOptions;
using job::PeerId;
using job::Submission;
using values::Bytes;

namespace {

constexpr std::uint64_t kGranule = 65536;

constexpr std::uint64_t kSeeds = 500;  // how many orders of events each test has

struct Planned {
  Frame terms;
  std::vector<long double> truth;  // of a reduction
  Bytes sent;                      // by the root of a broadcast
  bool fails = false;
};

JobOptions random_options(std::mt19937_64& random) {
  JobOptions options;
  options.servers = static_cast<std::uint32_t>(random() % 4);
  options.ranks_per_host.resize(2 + random() % 3);
  for (auto& ranks : options.ranks_per_host) ranks = 1 + static_cast<std::uint32_t>(random() % 3);
  options.streams = 1 + random() % 3;
  const std::uint64_t budgets[] = {0, 1000, 100'000, 1 << 22};
  options.budget_bytes = budgets[random() % 4];
  options.eager_budget_bytes = random() % 3 == 0 ? 4096 : 1 << 20;
  return options;
}

std::uint64_t random_count(std::uint64_t most, std::mt19937_64& random) {
  switch (random() % 8) {
    case 0:
      return 0;
    case 1:
      return std::min<std::uint64_t>(most, 1 + random() % most);
    default:
      return std::min<std::uint64_t>(most, 1 + random() % 300);
  }
}

Frame random_terms(std::uint64_t key, std::uint64_t round, std::uint64_t start, std::uint32_t hosts,
                   std::mt19937_64& random) {
  Frame terms;
  terms.key = key;
  terms.round = round;
  terms.start = start;
  terms.hash = random();
  do {
    terms.dtype = static_cast<std::uint8_t>(random() % commlib::kDTypeCount);
    terms.op = static_cast<std::uint8_t>(random() % commlib::kReduceOpCount);
  } while (!commlib::is_supported(static_cast<DType>(terms.dtype), static_cast<ReduceOp>(terms.op)));
  const std::uint64_t kind = random() % 10;
  terms.collective = kind == 0 ? Collective::kBarrier : kind <= 2 ? Collective::kBroadcast : Collective::kReduce;
  if (terms.collective == Collective::kBroadcast) terms.member = static_cast<std::uint32_t>(random() % hosts);
  const std::uint64_t item = job::result_item(terms);
  terms.count = terms.collective == Collective::kBarrier ? 0 : random_count(4 * kGranule / item, random);
  terms.whole = terms.count * item <= kGranule && random() % 8 != 0 ? 1 : 0;
  terms.priority = static_cast<std::int32_t>(random() % 7) - 3;
  return terms;
}

// Adds one operation to every host's program.
Planned plan(Job& job, const JobOptions& options, const Frame& terms) {
  Planned planned;
  planned.terms = terms;
  std::vector<Bytes> partials(job.hosts);
  if (terms.collective == Collective::kReduce) {
    values::Truth truth = values::make_truth(static_cast<DType>(terms.dtype), static_cast<ReduceOp>(terms.op),
                                             terms.count, options.ranks_per_host, job.random);
    partials = std::move(truth.partials);
    planned.truth = std::move(truth.results);
  } else if (terms.collective == Collective::kBroadcast) {
    planned.sent.resize(terms.count * job::result_item(terms));
    for (std::byte& byte : planned.sent) byte = static_cast<std::byte>(job.random());
    partials[terms.member] = planned.sent;
  }
  for (PeerId host = 0; host < job.hosts; ++host) {
    Submission submission{terms, std::move(partials[host])};
    submission.terms.priority += static_cast<std::int32_t>(host % 2);
    job.programs[host].push_back(std::move(submission));
  }
  return planned;
}

// Lets hosts disagree about the operation that was planned last, in a way that leaves each of them sensible.
void spoil(Job& job, Planned& planned) {
  planned.fails = true;
  const auto victim = job.random() % job.hosts;
  Submission& submission = job.programs[victim].back();
  Frame& terms = submission.terms;
  switch (job.random() % 4) {
    case 0:
      terms.flags = commlib::kFlagDisagree;
      break;
    case 1:
      terms.hash ^= 1;
      break;
    case 2:
      terms.op = static_cast<std::uint8_t>(ReduceOp::kMax);
      terms.dtype = static_cast<std::uint8_t>(DType::kFloat64);
      terms.count = job.random() % 2 == 0 ? 0 : 1 + job.random() % (4 * kGranule / 8);
      terms.whole = terms.count * 8 <= kGranule ? 1 : 0;
      terms.collective = Collective::kReduce;
      terms.hash ^= 2;
      submission.partial.assign(terms.count * 8, std::byte{1});
      break;
    default:
      terms.collective = Collective::kBarrier;
      terms.count = 0;
      terms.whole = 1;
      terms.hash ^= 4;
      submission.partial.clear();
      break;
  }
}

void check_outcome(const job::Outcome& outcome, const Planned& planned, PeerId host) {
  REQUIRE(outcome.code == (planned.fails ? Errc::kMismatch : Errc::kOk));
  if (planned.fails) return;
  if (planned.terms.collective == Collective::kReduce) {
    REQUIRE(values::is_right(static_cast<DType>(planned.terms.dtype), static_cast<ReduceOp>(planned.terms.op),
                             planned.terms.count, outcome.result, planned.truth));
  } else if (planned.terms.collective == Collective::kBroadcast && planned.terms.member != host) {
    REQUIRE(outcome.result == planned.sent);
  } else {
    REQUIRE(outcome.result.empty());
  }
}

void check_all(Job& job, const std::vector<Planned>& plans) {
  for (PeerId host = 0; host < job.hosts; ++host) {
    CAPTURE(host);
    REQUIRE(job.programs[host].empty());
    REQUIRE(job.host(host).busy() == 0);
    REQUIRE(job.host(host).outcomes.size() == plans.size());
    for (const Planned& planned : plans) {
      CAPTURE(planned.terms.key);
      CAPTURE(planned.terms.round);
      check_outcome(job.host(host).outcomes.at({planned.terms.key, planned.terms.round}), planned, host);
    }
  }
}

}  // namespace

TEST_CASE("engine: jobs in random order end with the right results and with nothing left over") {
  for (std::uint64_t seed = 0; seed < tried(kSeeds); ++seed) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    const JobOptions options = random_options(random);
    Job job(options, seed);
    std::vector<Planned> plans;
    for (std::uint64_t key = 1; key <= 1 + seed % 5; ++key) {
      const std::uint64_t start = random() % 4096 * 64;
      for (std::uint64_t round = 1; round <= 1 + seed % 3; ++round) {
        plans.push_back(plan(job, options, random_terms(key << 16, round, start, job.hosts, random)));
      }
    }
    job.run();
    check_all(job, plans);
    for (PeerId node = 0; node < job.nodes(); ++node) {
      REQUIRE(job.engine(node).live_shares() == 0);
      REQUIRE(job.engine(node).slot_bytes() == 0);
      REQUIRE(job.engine(node).reserved_bytes() == 0);
      REQUIRE(job.engine(node).counters().shares_failed == 0);
    }
  }
}

TEST_CASE("engine: rounds in which hosts disagree fail everywhere, and the next ones are as good as ever") {
  for (std::uint64_t seed = 0; seed < tried(kSeeds); ++seed) {
    CAPTURE(seed);
    std::mt19937_64 random(seed * 31 + 1);
    const JobOptions options = random_options(random);
    Job job(options, seed);
    std::vector<Planned> plans;
    const std::uint64_t keys = 1 + seed % 3;
    for (std::uint64_t key = 1; key <= keys; ++key) {
      const std::uint64_t start = random() % 4096 * 64;
      for (std::uint64_t round = 1; round <= 5; ++round) {
        plans.push_back(plan(job, options, random_terms(key << 16, round, start, job.hosts, random)));
        if (random() % 2 == 0) spoil(job, plans.back());
      }
    }
    job.run();
    check_all(job, plans);
    for (PeerId node = 0; node < job.nodes(); ++node) {
      // What one host announced to an owner that no other one knew of: at most the last round of a key, and no payload.
      REQUIRE(job.engine(node).live_shares() <= keys);
      REQUIRE(job.engine(node).slot_bytes() == 0);
      REQUIRE(job.engine(node).reserved_bytes() == 0);
    }
  }
}

TEST_CASE("engine: whenever a host is lost, everybody's memory is free in the end") {
  for (std::uint64_t seed = 0; seed < tried(kSeeds / 2); ++seed) {
    CAPTURE(seed);
    std::mt19937_64 random(seed * 7 + 3);
    const JobOptions options = random_options(random);
    Job job(options, seed);
    for (std::uint64_t key = 1; key <= 4; ++key) {
      const std::uint64_t start = random() % 4096 * 64;
      for (std::uint64_t round = 1; round <= 2; ++round) {
        (void)plan(job, options, random_terms(key << 16, round, start, job.hosts, random));
      }
    }
    for (std::uint64_t steps = random() % 2000; steps > 0 && job.step(); --steps) {
    }
    const auto lost = static_cast<PeerId>(random() % job.nodes());
    job.disconnect(lost, true);
    job.run();
    for (PeerId node = 0; node < job.nodes(); ++node) {
      if (node == lost) continue;
      CAPTURE(node);
      REQUIRE(job.engine(node).live_shares() == 0);
      REQUIRE(job.engine(node).slot_bytes() == 0);
      REQUIRE(job.engine(node).reserved_bytes() == 0);
    }
  }
}

TEST_CASE("engine: when a host leaves in order, what it has not announced fails at all others, and the rest succeeds") {
  for (std::uint64_t seed = 0; seed < tried(kSeeds / 2); ++seed) {
    CAPTURE(seed);
    std::mt19937_64 random(seed * 13 + 5);
    const JobOptions options = random_options(random);
    Job job(options, seed);
    std::vector<Planned> plans;
    for (std::uint64_t key = 1; key <= 3; ++key) {
      const std::uint64_t start = random() % 4096 * 64;
      for (std::uint64_t round = 1; round <= 3; ++round) {
        plans.push_back(plan(job, options, random_terms(key << 16, round, start, job.hosts, random)));
      }
    }
    const auto leaver = static_cast<PeerId>(random() % job.hosts);
    const std::size_t keeps = random() % (plans.size() + 1);
    job.programs[leaver].resize(keeps);
    while (job.step() && (!job.programs[leaver].empty() || job.host(leaver).busy() != 0)) {
    }
    REQUIRE(job.host(leaver).outcomes.size() == keeps);
    job.leave_in_order(leaver, 77);
    job.run();
    for (PeerId host = 0; host < job.hosts; ++host) {
      REQUIRE(job.host(host).busy() == 0);
      REQUIRE(job.programs[host].empty());
      for (std::size_t i = 0; i < (host == leaver ? keeps : plans.size()); ++i) {
        const job::Outcome& outcome = job.host(host).outcomes.at({plans[i].terms.key, plans[i].terms.round});
        if (i < keeps) {
          check_outcome(outcome, plans[i], host);
        } else {
          REQUIRE(outcome.code == Errc::kPeerLost);
          REQUIRE(outcome.member == 77);
        }
      }
    }
    if (seed % 2 == 0) job.disconnect(leaver, false);
    for (PeerId node = 0; node < job.nodes(); ++node) {
      REQUIRE(job.engine(node).live_shares() == 0);
      REQUIRE(job.engine(node).slot_bytes() == 0);
    }
  }
}

TEST_CASE("engine: the bits depend on the inputs alone") {
  // Inputs whose sums are rounded, so that another order of addition would show.
  const std::vector<std::uint32_t> ranks{1, 3, 2};
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBfloat16}) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kProduct}) {
      std::mt19937_64 random(5);
      std::uniform_real_distribution<double> values_of(-2, 2);
      const std::size_t count = 30'011;
      const std::size_t item = commlib::item_bytes(dtype);
      std::vector<Bytes> partials(3, Bytes(count * item));
      for (Bytes& partial : partials) {
        for (std::size_t i = 0; i < count; ++i) values::encode(dtype, partial.data() + i * item, values_of(random));
      }
      Bytes first;
      for (std::uint64_t seed = 0; seed < 12; ++seed) {
        CAPTURE(seed);
        JobOptions options = random_options(random);
        options.ranks_per_host = ranks;
        Job job(options, seed);
        Frame terms;
        terms.key = 1 << 16;
        terms.round = 1;
        terms.start = random() % 4096 * 64;
        terms.dtype = static_cast<std::uint8_t>(dtype);
        terms.op = static_cast<std::uint8_t>(op);
        terms.count = count;
        terms.whole = count * item <= kGranule ? 1 : 0;
        for (PeerId host = 0; host < 3; ++host) job.programs[host].push_back({terms, partials[host]});
        job.run();
        for (PeerId host = 0; host < 3; ++host) {
          const Bytes& result = job.host(host).outcomes.at({terms.key, 1}).result;
          if (first.empty()) first = result;
          REQUIRE(result == first);
        }
      }
      REQUIRE(first.size() == count * item);
    }
  }
}

TEST_CASE("engine: a thousand rounds of one key hold no more memory than one") {
  JobOptions options;
  options.ranks_per_host = {1, 1, 1};
  options.servers = 1;
  Job job(options, 11);
  std::vector<Planned> plans;
  for (std::uint64_t round = 1; round <= 1000; ++round) {
    Frame terms;
    terms.key = 5 << 16;
    terms.round = round;
    terms.hash = 1;
    terms.start = 640;
    terms.dtype = static_cast<std::uint8_t>(DType::kInt8);
    terms.op = static_cast<std::uint8_t>(ReduceOp::kAverage);
    terms.count = 700;
    terms.whole = 1;
    plans.push_back(plan(job, options, terms));
    if (round % 7 == 0) spoil(job, plans.back());
  }
  job.run();
  check_all(job, plans);
  for (PeerId node = 0; node < job.nodes(); ++node) {
    CHECK(job.engine(node).live_shares() <= 1);
    CHECK(job.engine(node).slot_bytes() == 0);
    CHECK(job.engine(node).counters().max_slot_bytes <= 4 * kGranule);  // a spoiled round may have one large payload
  }
}
