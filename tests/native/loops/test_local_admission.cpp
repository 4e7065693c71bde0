// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <atomic>
#include <random>
#include <thread>
#include <vector>

#include "loops/local.hpp"
#include "memory/segment.hpp"

namespace commlib::test {

namespace {

struct Desk {
  Segment segment = Segment::create(ReadyTable::bytes_needed(1));
  ReadyTable table{segment, 0, 1};

  [[nodiscard]] std::uint64_t granted(RowIndex row) const { return table.row(row).head().granted.load(); }
};

}  // namespace

TEST_CASE("local admission: the highest priority first, first come first served among equals") {
  Desk desk;
  LocalAdmission admission(desk.table, 100);
  admission.ask(0, 7, 100, 0);
  CHECK(desk.granted(0) == 7);
  admission.ask(1, 1, 60, 1);
  admission.ask(2, 1, 60, 5);
  admission.ask(3, 1, 60, 5);
  CHECK(desk.granted(2) == 0);
  admission.give_back(100);
  CHECK(desk.granted(2) == 1);
  CHECK(desk.granted(3) == 0);  // nor is it overtaken by what would fit
  admission.ask(4, 1, 40, 2);
  CHECK(desk.granted(4) == 0);
  admission.give_back(60);
  CHECK(desk.granted(3) == 1);
  CHECK(desk.granted(4) == 1);
  CHECK(desk.granted(1) == 0);
  admission.give_back(60);
  CHECK(desk.granted(1) == 1);
}

TEST_CASE("local admission: what is larger than the budget goes alone, and gives back no more than it took") {
  Desk desk;
  LocalAdmission admission(desk.table, 100);
  admission.ask(0, 1, 1, 0);
  admission.ask(1, 1, UINT64_MAX, 0);
  CHECK(desk.granted(1) == 0);
  admission.give_back(1);
  CHECK(desk.granted(1) == 1);
  admission.ask(2, 1, 1, 0);
  CHECK(desk.granted(2) == 0);
  admission.give_back(UINT64_MAX);
  CHECK(desk.granted(2) == 1);
  admission.ask(3, 1, 100, 0);
  CHECK(desk.granted(3) == 0);  // one byte of a hundred is taken
  admission.give_back(1);
  CHECK(desk.granted(3) == 1);
}

TEST_CASE("local admission: each grant is announced to the rank itself") {
  Desk desk;
  LocalAdmission admission(desk.table, 10);
  admission.ask(12, 1, 10, 0);
  RowIndex rows[64];
  REQUIRE(desk.table.take(rows, 64) == 1);
  CHECK(rows[0] == 12);
  admission.ask(4095, 1, 10, 0);
  CHECK(desk.table.take(rows, 64) == 0);
  admission.give_back(10);
  REQUIRE(desk.table.take(rows, 64) == 1);
  CHECK(rows[0] == 4095);
}

TEST_CASE("local admission: asked and given back by several threads, the budget holds and all get their turn") {
  constexpr std::uint64_t kBudget = 1'000;
  constexpr RowIndex kRows = 64;
  constexpr std::uint64_t kRounds = 200;
  Desk desk;
  LocalAdmission admission(desk.table, kBudget);
  std::atomic<std::uint64_t> held{0};
  std::atomic<bool> exceeded{false};
  std::vector<std::thread> threads;
  for (RowIndex first = 0; first < 2; ++first) {
    threads.emplace_back([&, first] {
      std::mt19937_64 random(first);
      for (std::uint64_t round = 1; round <= kRounds; ++round) {
        std::vector<std::uint64_t> bytes;
        for (RowIndex row = first; row < kRows; row += 2) {
          bytes.push_back(1 + random() % 600);
          admission.ask(row, round, bytes.back(), static_cast<std::int32_t>(random() % 3));
        }
        // Each holds what it is granted for a moment, in whatever order that comes.
        std::vector<bool> seen(bytes.size());
        for (std::size_t left = bytes.size(); left != 0;) {
          for (std::size_t i = 0; i < bytes.size(); ++i) {
            if (seen[i] || desk.granted(first + 2 * static_cast<RowIndex>(i)) != round) continue;
            if (held.fetch_add(bytes[i]) + bytes[i] > kBudget) exceeded = true;
            seen[i] = true;
            --left;
            held.fetch_sub(bytes[i]);
            admission.give_back(bytes[i]);
          }
          std::this_thread::yield();
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(!exceeded);
}

}  // namespace commlib::test
