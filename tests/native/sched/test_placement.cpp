// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <random>
#include <vector>

#include "base/errc.hpp"
#include "sched/placement.hpp"

using commlib::cut;
using commlib::DType;
using commlib::PeerId;
using commlib::Piece;
using commlib::Placement;

namespace {

constexpr std::uint64_t kGranule = 65536;

// The smooth weighted round robin as it is told: one balance for each owner.
std::vector<PeerId> told_sequence(std::uint32_t n, std::uint32_t k) {
  std::vector<std::int64_t> weights(n, n > k ? n - k : 0);
  weights.insert(weights.end(), k, k <= n ? 2 * (static_cast<std::int64_t>(n) - 1) : 1);
  std::int64_t divisor = 0;
  for (const std::int64_t weight : weights) divisor = std::gcd(divisor, weight);
  for (std::int64_t& weight : weights) weight /= divisor;
  const std::int64_t total = std::accumulate(weights.begin(), weights.end(), std::int64_t{0});
  std::vector<std::int64_t> balances(weights.size(), 0);
  std::vector<PeerId> sequence;
  for (std::int64_t step = 0; step < total; ++step) {
    for (std::size_t i = 0; i < weights.size(); ++i) balances[i] += weights[i];
    const auto best = std::max_element(balances.begin(), balances.end());
    *best -= total;
    sequence.push_back(static_cast<PeerId>(best - balances.begin()));
  }
  return sequence;
}

}  // namespace

TEST_CASE("placement: the turns are those of the smooth weighted round robin") {
  for (std::uint32_t n = 2; n <= 12; ++n) {
    for (std::uint32_t k = 0; k <= 14; ++k) {
      CAPTURE(n);
      CAPTURE(k);
      CHECK(Placement(n, k).sequence() == told_sequence(n, k));
    }
  }
}

TEST_CASE("placement: small known cases") {
  CHECK(Placement(2, 0).sequence() == std::vector<PeerId>{0, 1});
  CHECK(Placement(2, 1).sequence() == std::vector<PeerId>{2, 0, 1, 2});
  CHECK(Placement(2, 2).sequence() == std::vector<PeerId>{2, 3});
  CHECK(Placement(2, 3).sequence() == std::vector<PeerId>{2, 3, 4});
  CHECK(Placement(1, 0).sequence() == std::vector<PeerId>{0});
  CHECK(Placement(1, 4).sequence() == std::vector<PeerId>{0});
  CHECK_THROWS_AS(Placement(0, 3), commlib::Error);
}

TEST_CASE("placement: bytes in proportion are those of a turn, and all of them for who has most") {
  for (const auto& [n, k] : std::vector<std::pair<std::uint32_t, std::uint32_t>>{
           {1, 0}, {1, 2}, {2, 0}, {3, 1}, {4, 2}, {4, 3}, {4, 4}, {4, 6}, {64, 63}, {300, 1}}) {
    CAPTURE(n);
    CAPTURE(k);
    const Placement placement(n, k);
    std::map<PeerId, std::uint64_t> received;  // granules, from all other hosts, in one turn
    for (const PeerId owner : placement.sequence()) received[owner] += owner < n ? std::max(n, 2U) - 1 : n;
    std::uint64_t most = 0;
    for (const auto& [owner, count] : received) most = std::max(most, count);
    for (const std::uint64_t bytes :
         {std::uint64_t{0}, std::uint64_t{1}, 8'388'609 * most, 8'388'608 * most + most / 2}) {
      for (PeerId owner = 0; owner < n + k; ++owner) {
        CHECK(placement.in_proportion(owner, bytes) == bytes * received[owner] / most);
      }
      CHECK(placement.in_proportion(placement.sequence().back(), bytes) <= bytes);
    }
  }
}

TEST_CASE("placement: over a long space every owner has the share at which all links are equally busy") {
  for (const auto& [n, k] : std::vector<std::pair<std::uint32_t, std::uint32_t>>{
           {2, 0}, {2, 1}, {2, 2}, {3, 1}, {3, 2}, {4, 2}, {4, 3}, {5, 1}, {8, 3}, {16, 7}, {64, 1}, {40, 40}}) {
    CAPTURE(n);
    CAPTURE(k);
    const Placement placement(n, k);
    std::map<PeerId, double> granules;
    const std::uint64_t total = placement.sequence().size() * 7;
    for (std::uint64_t g = 0; g < total; ++g) granules[placement.owner_at(g * kGranule + g % kGranule)] += 1;
    const double denominator = double(n) * n + double(k) * n - 2.0 * k;
    for (PeerId owner = 0; owner < n + k; ++owner) {
      const double expected = owner < n ? (double(n) - k) / denominator : 2 * (double(n) - 1) / denominator;
      CHECK(granules[owner] / static_cast<double>(total) == doctest::Approx(expected).epsilon(1e-12));
    }
  }
}

TEST_CASE("placement: more servers than hosts share equally and hosts own nothing") {
  const Placement placement(3, 5);
  std::map<PeerId, int> granules;
  for (std::uint64_t g = 0; g < 500; ++g) ++granules[placement.owner_at(g * kGranule)];
  for (PeerId owner = 0; owner < 3; ++owner) CHECK(granules[owner] == 0);
  for (PeerId owner = 3; owner < 8; ++owner) CHECK(granules[owner] == 100);
}

TEST_CASE("placement: any stretch of the space is shared nearly as the whole") {
  // What makes a single tensor of a few megabytes go as fast as the sum of all.
  const Placement placement(4, 2);
  const double denominator = 16 + 8 - 4;
  for (std::uint64_t first = 0; first < placement.sequence().size(); ++first) {
    std::map<PeerId, double> granules;
    for (std::uint64_t g = 0; g < 128; ++g) granules[placement.owner_at((first + g) * kGranule)] += 1;
    for (PeerId owner = 0; owner < 6; ++owner) {
      const double expected = 128 * (owner < 4 ? 2 : 6) / denominator;
      CHECK(std::abs(granules[owner] - expected) <= 2);
    }
  }
}

TEST_CASE("placement: the highest addresses have owners too") {
  const Placement placement(3, 1);
  CHECK(placement.owner_at(UINT64_MAX) == placement.sequence()[(UINT64_MAX / kGranule) % placement.sequence().size()]);
}

TEST_CASE("pieces: every element once, in order, by the owner of its own byte") {
  std::mt19937_64 random(7);
  const Placement placement(3, 2);
  for (int trial = 0; trial < 2000; ++trial) {
    const auto dtype = static_cast<DType>(random() % commlib::kDTypeCount);
    const std::uint64_t item = commlib::item_bytes(dtype);
    const std::uint64_t start = random() % (1 << 22) * 64;
    const std::uint64_t count = 1 + random() % (5 * kGranule / item);
    std::vector<Piece> pieces(3);
    cut(placement, start, count, dtype, false, &pieces);
    std::uint64_t next = 0;
    for (const Piece& piece : pieces) {
      REQUIRE(piece.first_element == next);
      REQUIRE(piece.count > 0);
      next += piece.count;
      const std::uint64_t first_byte = start + piece.first_element * item;
      const std::uint64_t last_byte = first_byte + piece.count * item - 1;
      REQUIRE(first_byte / kGranule == last_byte / kGranule);
      REQUIRE(piece.owner == placement.owner_at(first_byte));
      // It ends at a boundary or at the end, so that pieces are as large as they can be.
      REQUIRE(((last_byte + 1) % kGranule == 0 || next == count));
    }
    REQUIRE(next == count);
  }
}

TEST_CASE("pieces: a whole partition is one piece even across a boundary; so is an empty one") {
  const Placement placement(2, 0);
  std::vector<Piece> pieces;
  cut(placement, kGranule - 64, 16384, DType::kFloat32, true, &pieces);
  CHECK(pieces == std::vector<Piece>{{0, 16384, 0}});
  cut(placement, kGranule - 64, 17, DType::kFloat32, false, &pieces);
  CHECK(pieces == std::vector<Piece>{{0, 16, 0}, {16, 1, 1}});
  cut(placement, kGranule, 0, DType::kFloat64, false, &pieces);
  CHECK(pieces == std::vector<Piece>{{0, 0, 1}});
  cut(placement, kGranule, 0, DType::kFloat64, true, &pieces);
  CHECK(pieces == std::vector<Piece>{{0, 0, 1}});
}
