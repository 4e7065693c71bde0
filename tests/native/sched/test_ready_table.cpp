// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "sched/ready_table.hpp"
#include "sched/wire.hpp"

namespace commlib::test {

namespace {

struct Host {
  explicit Host(std::uint32_t ranks) : segment(Segment::create(ReadyTable::bytes_needed(ranks))) {
    for (std::uint32_t rank = 0; rank < ranks; ++rank) tables.emplace_back(segment, rank, ranks);
  }
  Segment segment;
  std::vector<ReadyTable> tables;  // one a rank, all on one mapping, so that ThreadSanitizer sees who meets whom
};

Row::Arrival arrival(std::uint64_t round, std::uint64_t hash = 7, std::uint32_t caller = 0, bool keeps = false) {
  return {.round = round,
          .hash = hash,
          .input = Place::in_arena(0, 64),
          .output = Place::in_arena(0, 128),
          .staged = true,
          .copied = false,
          .keeps = keeps,
          .caller = caller};
}

std::vector<RowIndex> take_all(const ReadyTable& table) {
  std::vector<RowIndex> all;
  RowIndex rows[64];
  for (int n; (n = table.take(rows, 64)) > 0;) all.insert(all.end(), rows, rows + n);
  std::sort(all.begin(), all.end());
  return all;
}

}  // namespace

TEST_CASE("a place says where it is") {
  const Place in = Place::in_arena(3, 0x00AB'CDEF'0123'4567);
  CHECK_FALSE(in.is_address());
  CHECK_FALSE(in.is_nowhere());
  CHECK(in.arena() == 3);
  CHECK(in.offset() == 0x00AB'CDEF'0123'4567);
  int here = 0;
  const Place at = Place::from_bits(Place::at_address(&here).bits());
  CHECK(at.is_address());
  CHECK(at.offset() == reinterpret_cast<std::uintptr_t>(&here));
  CHECK(Place::nowhere().is_nowhere());
  CHECK_FALSE(Place::nowhere().is_address());
}

TEST_CASE("the last to arrive sees that all have, and no one before") {
  const Host host(3);
  const Row row = host.tables[0].row(5);
  for (const std::uint64_t round : {1u, 2u, 3u}) {
    CHECK_FALSE(row.arrive(0, arrival(round)));
    CHECK_FALSE(row.arrive(2, arrival(round)));
    CHECK(row.meeting(round, 7) == Row::Meeting::kMissing);
    CHECK(row.has_arrived(2, round));
    CHECK_FALSE(row.has_arrived(1, round));
    CHECK(row.arrive(1, arrival(round)));
    CHECK(row.meeting(round, 7) == Row::Meeting::kAgree);
    CHECK(row.meeting(round, 8) == Row::Meeting::kDisagree);
  }
  CHECK(row.meeting(2, 7) == Row::Meeting::kOver);
}

TEST_CASE("a signature of the next round is not taken for one of this") {
  const Host host(2);
  const Row row = host.tables[0].row(0);
  (void)row.arrive(0, arrival(1, 10));
  (void)row.arrive(1, arrival(1, 20));
  CHECK(row.meeting(1, 10) == Row::Meeting::kDisagree);
  (void)row.arrive(1, arrival(2, 10));  // rank 1 has seen the failure and is in the next round, with rank 0's signature
  CHECK(row.meeting(1, 10) == Row::Meeting::kOver);
}

TEST_CASE("each slice is claimed once a round, the preferred one first") {
  const Host host(4);
  const Row row = host.tables[0].row(9);
  for (std::uint64_t round = 1; round <= 3; ++round) {
    CHECK(row.claim(round, 2, 4) == 2);
    CHECK(row.claim(round, 2, 4) == 3);
    CHECK(row.claim(round, 2, 4) == 0);
    CHECK(row.claim(round, 1, 4) == 1);
    CHECK(row.claim(round, 0, 4) == -1);
    CHECK_FALSE(row.all_done(round, 4));
    CHECK_FALSE(row.finish_slice(round, 3, 1, 4));
    CHECK_FALSE(row.finish_slice(round, 0, 2, 4));
    CHECK_FALSE(row.finish_slice(round, 1, 3, 4));
    CHECK(row.finish_slice(round, 2, 0, 4));
    CHECK(row.all_done(round, 4));
    CHECK(row.executor(0) == 2);
    CHECK(row.executor(3) == 1);
  }
  CHECK(row.claim(2, 0, 4) == -1);  // a straggler of an older round finds nothing to do
}

TEST_CASE("the first failure of a round stays, a later round's replaces it, and members survive the packing") {
  const Host host(1);
  const Row row = host.tables[0].row(0);
  CHECK(row.failure(1).code == Errc::kOk);
  row.fail(4, {Errc::kMismatch, Failure::kNobody});
  row.fail(4, {Errc::kPeerLost, 3});
  CHECK(row.failure(4).code == Errc::kMismatch);
  CHECK(row.failure(4).member == Failure::kNobody);
  CHECK(row.failure(5).code == Errc::kOk);
  row.fail(3, {Errc::kPeerLost, 3});  // a straggler
  CHECK(row.failure(4).code == Errc::kMismatch);
  std::uint64_t round = 10;
  for (const std::uint32_t member : {0u, 32766u, kServerBit | 0u, kServerBit | 12u}) {
    row.fail(++round, {Errc::kPeerLost, member});
    CHECK(row.failure(round).code == Errc::kPeerLost);
    CHECK(row.failure(round).member == member);
  }
}

TEST_CASE("announced rows are taken once, however many there are and wherever they lie") {
  const Host host(2);
  const std::vector<RowIndex> rows = {0, 1, 63, 64, 65, 4095, 4096, 262'143, 262'144, 700'000, kMaxRows - 1};
  for (const RowIndex row : rows) {
    host.tables[0].post(row, 1);
    host.tables[0].post(row, 1);
  }
  CHECK(take_all(host.tables[0]).empty());
  CHECK(take_all(host.tables[1]) == rows);
  CHECK(take_all(host.tables[1]).empty());
  std::vector<RowIndex> dense;
  for (RowIndex row = 0; row < 10'000; ++row) dense.push_back(row);
  for (const RowIndex row : dense) host.tables[1].post(row, 0);
  CHECK(take_all(host.tables[0]) == dense);
}

TEST_CASE("there are enough CPUs where each rank has as many as there are ranks, or some of its own") {
  const auto verdicts = [](const std::vector<std::vector<int>>& cpus) {
    const Host host(static_cast<std::uint32_t>(cpus.size()));
    CHECK(host.tables[0].enough_cpus() == Errc::kAgain);
    for (std::size_t rank = 0; rank < cpus.size(); ++rank) host.tables[rank].publish_cpus(cpus[rank]);
    std::vector<bool> enough;
    for (const ReadyTable& table : host.tables) enough.push_back(table.enough_cpus() == Errc::kOk);
    return enough;
  };
  using Verdicts = std::vector<bool>;
  CHECK(verdicts({{0, 1}, {0, 1}}) == Verdicts{true, true});
  CHECK(verdicts({{0}, {1}}) == Verdicts{true, true});
  CHECK(verdicts({{0}, {0}}) == Verdicts{false, false});
  CHECK(verdicts({{0}, {0, 1}}) == Verdicts{false, true});
  CHECK(verdicts({{0, 1}, {0, 1}, {0, 1}}) == Verdicts{false, false, false});
  CHECK(verdicts({{64}, {128}, {1023}}) == Verdicts{true, true, true});
  CHECK(verdicts({{5000}, {5001}}) == Verdicts{false, false});  // more than can be said
}

TEST_CASE("who looks later hears of work, not of ends") {
  const Host host(2);
  const ReadyTable& table = host.tables[0];
  (void)table.row(3).arrive(0, arrival(1, 7, commlib::kLooksLater));
  (void)table.row(3).arrive(1, arrival(1));
  const std::uint32_t loop = table.status(0).doorbell.ticket();
  table.announce_all(3, UINT32_MAX, commlib::News::kEnd);
  CHECK(take_all(host.tables[0]).empty());
  CHECK(table.status(0).doorbell.ticket() == loop);
  CHECK(take_all(host.tables[1]) == std::vector<RowIndex>{3});
  table.announce_all(3);
  CHECK(take_all(host.tables[0]) == std::vector<RowIndex>{3});
}

TEST_CASE("a slice that a rank keeps is nobody else's") {
  const Host host(3);
  const Row row = host.tables[0].row(5);
  for (std::uint32_t rank = 0; rank < 3; ++rank) (void)row.arrive(rank, arrival(1, 7, 0, rank == 1));
  CHECK(row.claim(1, 0, 3) == 0);
  CHECK(row.claim(1, 0, 3) == 2);
  CHECK(row.claim(1, 0, 3) == -1);
  CHECK(row.claim(1, 2, 3) == -1);
  CHECK(row.claim(1, 1, 3) == 1);
  CHECK(row.claim(1, 1, 3) == -1);
  // In the next round it keeps nothing.
  for (std::uint32_t rank = 0; rank < 3; ++rank) (void)row.arrive(rank, arrival(2));
  CHECK(row.claim(2, 0, 3) == 0);
  CHECK(row.claim(2, 0, 3) == 1);
}

TEST_CASE("a caller is rung at its own doorbell, a loop through the bitmap") {
  const Host host(2);
  const ReadyTable& table = host.tables[0];
  (void)table.row(3).arrive(0, arrival(1, 7, 5));
  (void)table.row(3).arrive(1, arrival(1));
  const std::uint32_t caller = table.status(0).callers[4].ticket();
  const std::uint32_t loop = table.status(1).doorbell.ticket();
  table.announce_all(3);
  CHECK(table.status(0).callers[4].ticket() != caller);
  CHECK(take_all(host.tables[0]).empty());
  CHECK(table.status(1).doorbell.ticket() != loop);
  CHECK(take_all(host.tables[1]) == std::vector<RowIndex>{3});
  table.announce_all(3, 1);
  CHECK(take_all(host.tables[1]).empty());
}

TEST_CASE("the first to abort is the one that is named") {
  const Host host(2);
  CHECK_FALSE(host.tables[0].aborted());
  CHECK(host.tables[1].abort(kServerBit | 2, Cause::kClosed));
  CHECK_FALSE(host.tables[0].abort(1, Cause::kDied));
  CHECK(host.tables[0].aborted());
  CHECK(host.tables[0].aborted_member() == (kServerBit | 2));
  CHECK(host.tables[0].aborted_cause() == Cause::kClosed);
}

TEST_CASE("bits set while others are taken are never lost") {
  const Host host(2);
  constexpr RowIndex kRows = 3'000;
  constexpr int kPosters = 3;
  std::vector<std::atomic<int>> posted(kRows);
  std::atomic<int> running{kPosters};
  std::vector<std::thread> posters;
  for (int p = 0; p < kPosters; ++p) {
    posters.emplace_back([&, p] {
      std::mt19937 random(static_cast<unsigned>(p));
      for (int i = 0; i < 20'000; ++i) {
        const auto row = static_cast<RowIndex>(random() % kRows);
        posted[row].store(1, std::memory_order_release);
        host.tables[0].post(row * 331 % kMaxRows, 1);
      }
      running.fetch_sub(1, std::memory_order_acq_rel);
    });
  }
  std::set<RowIndex> seen;
  RowIndex rows[256];
  for (;;) {
    const bool last = running.load(std::memory_order_acquire) == 0;
    for (int n; (n = host.tables[1].take(rows, 256)) > 0;) seen.insert(rows, rows + n);
    if (last) break;
    std::this_thread::yield();
  }
  for (std::thread& poster : posters) poster.join();
  for (RowIndex row = 0; row < kRows; ++row) {
    if (posted[row].load(std::memory_order_acquire) != 0) CHECK(seen.count(row * 331 % kMaxRows) == 1);
  }
}

TEST_CASE("rounds back to back on many rows: every slice is done once, and nobody goes ahead before") {
  for (const std::uint32_t ranks : {2u, 3u, 4u}) {
    const Host host(ranks);
    constexpr RowIndex kRows = 3;
    constexpr std::uint64_t kRounds = 300;
    std::vector<std::atomic<std::uint64_t>> done(kRows * ranks);  // how often each slice has been done
    // What a slice's doer reads, written by each rank before it arrives: not atomic, so that ThreadSanitizer objects if the
    // protocol does not order it.
    std::vector<std::uint64_t> inputs(kRows * ranks);
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([&, rank] {
        const ReadyTable& table = host.tables[rank];
        std::mt19937 random(rank);
        for (std::uint64_t round = 1; round <= kRounds; ++round) {
          for (RowIndex index = 0; index < kRows; ++index) {
            const Row row = table.row(index);
            inputs[index * ranks + rank] = round;
            if (random() % 4 == 0) std::this_thread::yield();
            (void)row.arrive(rank, arrival(round));
            while (row.meeting(round, 7) == Row::Meeting::kMissing) std::this_thread::yield();
            for (int slice; (slice = row.claim(round, rank, ranks)) >= 0;) {
              for (std::uint32_t other = 0; other < ranks; ++other) {
                if (inputs[index * ranks + other] != round) ++wrong;
              }
              done[index * ranks + static_cast<std::uint32_t>(slice)].fetch_add(1, std::memory_order_relaxed);
              (void)row.finish_slice(round, static_cast<std::uint32_t>(slice), rank, ranks);
            }
            while (!row.all_done(round, ranks)) std::this_thread::yield();
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong == 0);
    for (const auto& times : done) CHECK(times == kRounds);
  }
}

TEST_CASE("of those who arrive, finish or copy at once, at least one sees that it was the last") {
  const Host host(3);
  constexpr std::uint64_t kRounds = 2'000;
  std::atomic<std::uint64_t> seen[3] = {};
  std::atomic<std::uint32_t> at_gate{0};
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      const Row row = host.tables[rank].row(1);
      const auto gate = [&](std::uint32_t passes) {
        at_gate.fetch_add(1, std::memory_order_acq_rel);
        while (at_gate.load(std::memory_order_acquire) < passes * 3) std::this_thread::yield();
      };
      std::uint32_t passes = 0;
      for (std::uint64_t round = 1; round <= kRounds; ++round) {
        gate(++passes);
        if (row.arrive(rank, arrival(round))) seen[0].fetch_add(1);
        gate(++passes);
        if (row.finish_slice(round, rank, rank, 3)) seen[1].fetch_add(1);
        gate(++passes);
        if (row.finish_copying(round, rank)) seen[2].fetch_add(1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(seen[0] >= kRounds);
  CHECK(seen[1] >= kRounds);
  CHECK(seen[2] >= kRounds);
}

}  // namespace commlib::test
