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
