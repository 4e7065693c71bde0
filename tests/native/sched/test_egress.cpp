// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "sched/egress.hpp"

using commlib::Egress;
using commlib::Frame;
using commlib::FrameKind;
using commlib::OutFrame;
using commlib::PeerId;

namespace {

OutFrame frame_of(FrameKind kind, std::uint64_t key, std::uint32_t payload_bytes = 0) {
  OutFrame out;
  out.frame.kind = kind;
  out.frame.key = key;
  out.frame.payload_bytes = payload_bytes;
  return out;
}

std::vector<std::uint64_t> drain(Egress& egress, PeerId peer) {
  std::vector<std::uint64_t> keys;
  OutFrame out;
  while (egress.next(peer, &out)) keys.push_back(out.frame.key);
  return keys;
}

}  // namespace

TEST_CASE("egress: steering frames first and in order, then data by priority, in order among equals") {
  Egress egress(2);
  egress.push(1, frame_of(FrameKind::kPush, 1), 0);
  egress.push(1, frame_of(FrameKind::kResult, 2), 7);
  egress.push(1, frame_of(FrameKind::kEager, 3), 7);
  egress.push(1, frame_of(FrameKind::kReady, 4), -100);
  egress.push(1, frame_of(FrameKind::kPush, 5), INT32_MAX);
  egress.push(1, frame_of(FrameKind::kPush, 6), INT32_MIN);
  egress.push(1, frame_of(FrameKind::kGrant, 7), 5);
  egress.push(1, frame_of(FrameKind::kAbort, 8), 0);
  egress.push(1, frame_of(FrameKind::kFail, 9), 9);
  egress.push(1, frame_of(FrameKind::kBeat, 10), 9);
  CHECK(drain(egress, 0).empty());
  CHECK(drain(egress, 1) == std::vector<std::uint64_t>{4, 7, 8, 9, 10, 5, 2, 3, 1, 6});
}

TEST_CASE("egress: a late frame of high priority overtakes") {
  Egress egress(1);
  for (std::uint64_t key = 0; key < 100; ++key) egress.push(0, frame_of(FrameKind::kPush, key), 1);
  OutFrame out;
  REQUIRE(egress.next(0, &out));
  CHECK(out.frame.key == 0);
  egress.push(0, frame_of(FrameKind::kPush, 1000), 2);
  REQUIRE(egress.next(0, &out));
  CHECK(out.frame.key == 1000);
  REQUIRE(egress.next(0, &out));
  CHECK(out.frame.key == 1);
}

TEST_CASE("egress: the order is that of a stable sort, whatever is pushed and taken in between") {
  std::mt19937_64 random(3);
  Egress egress(3);
  struct Pushed {
    std::int64_t rank;
    std::uint64_t key;
  };
  std::vector<Pushed> model[3];
  for (std::uint64_t key = 0; key < 20000; ++key) {
    const auto peer = static_cast<PeerId>(random() % 3);
    if (random() % 2 == 0) {
      const bool steering = random() % 4 == 0;
      const auto priority = static_cast<std::int32_t>(random() % 5) - 2;
      egress.push(peer, frame_of(steering ? FrameKind::kReady : FrameKind::kPush, key), priority);
      model[peer].push_back({steering ? INT64_MAX : priority, key});
    } else {
      const auto best = std::max_element(model[peer].begin(), model[peer].end(),
                                         [](const Pushed& a, const Pushed& b) { return a.rank < b.rank; });
      OutFrame out;
      REQUIRE(egress.has(peer) == !model[peer].empty());
      REQUIRE(egress.next(peer, &out) == !model[peer].empty());
      if (model[peer].empty()) continue;
      REQUIRE(out.frame.key == best->key);
      model[peer].erase(best);
    }
  }
}

TEST_CASE("egress: payload and context come back as they were given") {
  Egress egress(1);
  const std::byte payload[4] = {};
  int context = 0;
  OutFrame in = frame_of(FrameKind::kPush, 5, 4);
  in.payload = payload;
  in.context = &context;
  egress.push(0, in, 0);
  OutFrame out;
  REQUIRE(egress.next(0, &out));
  CHECK(out.payload == payload);
  CHECK(out.context == &context);
  CHECK(out.frame.payload_bytes == 4);
}

TEST_CASE("egress: bytes are counted while they wait and while they leave") {
  Egress egress(2);
  egress.push(0, frame_of(FrameKind::kPush, 1, 1000), 0);
  egress.push(0, frame_of(FrameKind::kPush, 2, 500), 0);
  egress.push(1, frame_of(FrameKind::kReady, 3), 0);
  CHECK(egress.queued_bytes(0) == 1628);
  CHECK(egress.queued_bytes(1) == 64);
  CHECK(egress.in_flight_bytes(0) == 0);
  OutFrame first;
  OutFrame second;
  REQUIRE(egress.next(0, &first));
  CHECK(egress.queued_bytes(0) == 564);
  CHECK(egress.in_flight_bytes(0) == 1064);
  REQUIRE(egress.next(0, &second));
  egress.sent(0, first);
  CHECK(egress.queued_bytes(0) == 0);
  CHECK(egress.in_flight_bytes(0) == 564);
  egress.sent(0, second);
  CHECK(egress.in_flight_bytes(0) == 0);
}

TEST_CASE("egress: somebody is told when a queue is no longer empty, and only then") {
  Egress egress(2);
  std::vector<PeerId> told;
  egress.set_notify([&told](PeerId peer) { told.push_back(peer); });
  egress.push(1, frame_of(FrameKind::kPush, 1), 0);
  egress.push(1, frame_of(FrameKind::kPush, 2), 0);
  egress.push(0, frame_of(FrameKind::kBeat, 3), 0);
  CHECK(told == std::vector<PeerId>{1, 0});
  (void)drain(egress, 1);
  egress.push(1, frame_of(FrameKind::kPush, 4), 0);
  CHECK(told == std::vector<PeerId>{1, 0, 1});
}

TEST_CASE("egress: a peer that is gone gets nothing, and others lose nothing") {
  Egress egress(2);
  OutFrame out;
  for (std::uint64_t key = 0; key < 10; ++key) {
    egress.push(0, frame_of(FrameKind::kPush, key, 8), 0);
    egress.push(1, frame_of(FrameKind::kPush, key, 8), 0);
  }
  REQUIRE(egress.next(0, &out));
  egress.discard(0);
  CHECK_FALSE(egress.has(0));
  CHECK(egress.queued_bytes(0) == 0);
  CHECK(egress.in_flight_bytes(0) == 0);
  egress.sent(0, out);  // it was on its way
  CHECK(egress.in_flight_bytes(0) == 0);
  egress.push(0, frame_of(FrameKind::kPush, 99), 0);
  CHECK_FALSE(egress.next(0, &out));
  egress.discard(0);
  CHECK(drain(egress, 1) == std::vector<std::uint64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9});
}

TEST_CASE("egress: where it holds, nobody is sent more than a little of what stands behind what another waits for") {
  constexpr std::uint64_t kFar = Egress::kMostAheadBytes + 1;
  Egress egress(4, 3, true);
  std::vector<PeerId> told;
  egress.set_notify([&](PeerId peer) { told.push_back(peer); });
  const std::uint64_t line = egress.reserve(4 * kFar);
  egress.push(1, frame_of(FrameKind::kPush, 11), 0, line);
  egress.push(2, frame_of(FrameKind::kPush, 20), 0, line + Egress::kMostAheadBytes);
  egress.push(2, frame_of(FrameKind::kPush, 21), 0, line + kFar);
  egress.push(2, frame_of(FrameKind::kResult, 22), 5, line + 2 * kFar);  // of a higher priority: never held up
  egress.push(2, frame_of(FrameKind::kReady, 23), 0);                    // nor what steers
  egress.push(3, frame_of(FrameKind::kPush, 31), 0, line + 3 * kFar);    // nor what is for the own node
  told.clear();
  CHECK(drain(egress, 2) == std::vector<std::uint64_t>{23, 22, 20});
  CHECK(egress.has(2));
  CHECK(drain(egress, 3) == std::vector<std::uint64_t>{31});
  CHECK(told.empty());

  SUBCASE("until that has been taken") { CHECK(drain(egress, 1) == std::vector<std::uint64_t>{11}); }
  SUBCASE("or its peer is gone") { egress.discard(1); }
  SUBCASE("or nothing is to be held any more") { egress.stop_holding(); }
  SUBCASE("or something comes for it that stands farther ahead") {
    egress.push(2, frame_of(FrameKind::kPush, 24), 0, line);
    CHECK(told == std::vector<PeerId>{2});
    CHECK(drain(egress, 2) == std::vector<std::uint64_t>{24});
    CHECK(drain(egress, 1) == std::vector<std::uint64_t>{11});
    told.erase(told.begin());
  }
  CHECK(told == std::vector<PeerId>{2});
  CHECK(drain(egress, 2) == std::vector<std::uint64_t>{21});
}

TEST_CASE("egress: what is not reserved is not held, and one that does not hold does not") {
  for (const bool holds : {false, true}) {
    Egress egress(3, 0, holds);
    const std::uint64_t line = egress.reserve(100 << 20);
    egress.push(1, frame_of(FrameKind::kPush, 1), 0, line);
    if (!holds) egress.push(2, frame_of(FrameKind::kPush, 2), 0, line + (50 << 20));
    egress.push(2, frame_of(FrameKind::kEager, 3), 0);
    CHECK(drain(egress, 2).size() == (holds ? 1 : 2));
  }
}

TEST_CASE("egress: whoever waits for a word is told, and everything leaves, in whatever order it comes") {
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    constexpr PeerId kPeers = 5;
    Egress egress(kPeers, random() % kPeers, true);
    std::vector<bool> may_ask(kPeers, false);  // has been told since it was last refused
    egress.set_notify([&](PeerId peer) { may_ask[peer] = true; });
    std::uint64_t pushed = 0;
    std::uint64_t left = 0;
    std::uint64_t line = 0;
    for (int step = 0; step < 2000; ++step) {
      if (step < 1000 && random() % 2 == 0) {
        if (random() % 20 == 0) line = egress.reserve(8 << 20);
        const auto priority = static_cast<std::int32_t>(random() % 3);
        const OutFrame out = frame_of(FrameKind::kPush, ++pushed, random() % 65536);
        if (random() % 4 == 0) {
          egress.push(random() % kPeers, out, priority);
        } else {
          egress.push(random() % kPeers, out, priority, line + random() % (8 << 20));
        }
        continue;
      }
      // Any of those who may ask; the others wait for ever if they are not told.
      const PeerId peer = random() % kPeers;
      OutFrame out;
      if (!may_ask[peer]) continue;
      if (egress.next(peer, &out)) {
        ++left;
        egress.sent(peer, out);
      } else {
        may_ask[peer] = false;
      }
    }
    for (bool moved = true; moved;) {
      moved = false;
      for (PeerId peer = 0; peer < kPeers; ++peer) {
        OutFrame out;
        while (may_ask[peer] && egress.next(peer, &out)) {
          ++left;
          moved = true;
        }
        may_ask[peer] = false;
      }
      for (PeerId peer = 0; peer < kPeers; ++peer) moved = moved || may_ask[peer];
    }
    CHECK(left == pushed);
    for (PeerId peer = 0; peer < kPeers; ++peer) CHECK(!egress.has(peer));
  }
}
