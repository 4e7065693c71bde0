// SPDX-License-Identifier: Apache-2.0
// The rules of the protocol, one by one.
#include <doctest/doctest.h>

#include <string>

#include "base/errc.hpp"
#include "desk.hpp"

using desk::accumulated_by;
using desk::barrier;
using desk::broadcast_from;
using desk::Desk;
using desk::DType;
using desk::eager;
using desk::Errc;
using desk::Frame;
using desk::FrameKind;
using desk::kGranule;
using desk::kPerGranule;
using desk::options_of;
using desk::OutFrame;
using desk::PeerId;
using desk::push;
using desk::ready;
using desk::with_hash;
using desk::without_payload;

TEST_CASE("engine: impossible options are refused") {
  commlib::Egress egress(8);
  const auto code_of = [&egress](const commlib::EngineOptions& options) {
    try {
      const commlib::ServerEngine engine(options, egress, nullptr);
    } catch (const commlib::Error& error) {
      return error.code();
    }
    return Errc::kOk;
  };
  CHECK(code_of(options_of(2)) == Errc::kOk);
  CHECK(code_of(options_of(1)) == Errc::kConfig);
  auto options = options_of(3);
  options.self = 3;
  CHECK(code_of(options) == Errc::kConfig);
  options = options_of(3);
  options.ranks_per_host.pop_back();
  CHECK(code_of(options) == Errc::kConfig);
  options = options_of(3);
  options.ranks_per_host[1] = 0;
  CHECK(code_of(options) == Errc::kConfig);
  options = options_of(3);
  options.partition_bytes += 64;
  CHECK(code_of(options) == Errc::kConfig);
}

TEST_CASE("engine: READY from all, GRANT to all, and each piece is answered as soon as it is there from all") {
  Desk desk(options_of(3));
  const std::uint32_t count = 4 * kPerGranule;  // granules 0 and 3 are owner 0's
  REQUIRE(desk.send(2, ready(1, 1, count)) == Errc::kOk);
  REQUIRE(desk.send_local(ready(1, 1, count)) == Errc::kOk);
  CHECK(desk.flush_hosts(3) == "");
  REQUIRE(desk.send(1, ready(1, 1, count)) == Errc::kOk);
  for (PeerId host = 0; host < 3; ++host) CHECK(desk.flush(host) == "G");
  CHECK(desk.engine.reserved_bytes() == 2 * 2 * kGranule);  // two remote hosts, two pieces

  const std::uint64_t last = 3 * kPerGranule;
  REQUIRE(desk.send(1, push(1, 1, last, kPerGranule), 1) == Errc::kOk);
  REQUIRE(desk.send(1, push(1, 1, 0, kPerGranule), 2) == Errc::kOk);
  REQUIRE(desk.send(2, push(1, 1, last, kPerGranule), 10) == Errc::kOk);
  CHECK(desk.flush(0) == "");
  REQUIRE(desk.send_local(push(1, 1, last, kPerGranule), 100) == Errc::kOk);
  for (PeerId host = 0; host < 3; ++host) {
    const auto frames = desk.take(host);
    REQUIRE(frames.size() == 1);
    CHECK(frames[0].frame.kind == FrameKind::kResult);
    CHECK(frames[0].frame.key == 1 << 16);
    CHECK(frames[0].frame.round == 1);
    CHECK(frames[0].frame.start == last);
    CHECK(frames[0].frame.count == kPerGranule);
    CHECK(frames[0].frame.payload_bytes == kGranule);
    CHECK(Desk::element(frames[0], 0) == 111);
    CHECK(Desk::element(frames[0], kPerGranule - 1) == 111);
    desk.sent(host, frames[0]);
  }
  CHECK(desk.engine.live_shares() == 1);
  CHECK(desk.engine.slot_bytes() == kGranule);  // host 1's first piece
  REQUIRE(desk.send_local(push(1, 1, 0, kPerGranule), 0) == Errc::kOk);
  REQUIRE(desk.send(2, push(1, 1, 0, kPerGranule), 3) == Errc::kOk);
  for (PeerId host = 0; host < 3; ++host) {
    CHECK(desk.engine.reserved_bytes() == 4 * kGranule);  // until the last host has it
    CHECK(desk.flush(host) == "R");
  }
  CHECK(desk.is_clean());
  CHECK(desk.engine.counters().received_bytes == 4 * kGranule);
  CHECK(desk.engine.counters().sent_bytes == 4 * kGranule);
  CHECK(desk.engine.counters().shares_granted == 1);
}

TEST_CASE("engine: a dedicated server sums what hosts send, in slots alone") {
  Desk desk(options_of(2, 3));  // two hosts, two servers: servers own everything, node 3 the odd granules
  Frame announcement = ready(1, 1, 100);
  announcement.start = kGranule;
  for (PeerId host = 0; host < 2; ++host) REQUIRE(desk.send(host, announcement) == Errc::kOk);
  CHECK(desk.engine.reserved_bytes() == 800);
  for (PeerId host = 0; host < 2; ++host) {
    CHECK(desk.flush(host) == "G");
    REQUIRE(desk.send(host, push(1, 1, 0, 100), 4) == Errc::kOk);
  }
  for (PeerId host = 0; host < 2; ++host) {
    const auto frames = desk.take(host);
    REQUIRE(frames.size() == 1);
    CHECK(Desk::element(frames[0], 99) == 8);
    desk.sent(host, frames[0]);
  }
  CHECK(desk.is_clean());
  CHECK(desk.engine.on_local({ready(2, 1, 100), nullptr, nullptr}) == Errc::kInternal);
}

TEST_CASE("engine: a budget is given by priority, first come first served, and never more than there is") {
  Desk desk(options_of(2, 0, 1000));
  const auto announce = [&desk](std::uint64_t key, std::uint64_t count, std::int32_t mine, std::int32_t theirs) {
    REQUIRE(desk.send_local(ready(key, 1, count, mine)) == Errc::kOk);
    REQUIRE(desk.send(1, ready(key, 1, count, theirs)) == Errc::kOk);
  };
  const auto granted = [&desk] {
    std::string keys;
    for (const OutFrame& out : desk.take(1)) {
      if (out.frame.kind == FrameKind::kGrant) keys += std::to_string(out.frame.key >> 16);
      desk.sent(1, out);
    }
    (void)desk.flush(0);
    return keys;
  };
  const auto finish = [&](std::uint64_t key, std::uint32_t count) {
    REQUIRE(desk.send_local(push(key, 1, 0, count), 1) == Errc::kOk);
    REQUIRE(desk.send(1, push(key, 1, 0, count), 1) == Errc::kOk);
    return granted();
  };
  announce(1, 250, 0, 0);  // all of it
  CHECK(granted() == "1");
  announce(2, 125, 0, 0);
  announce(3, 125, 1, 0);  // the higher of the two counts
  announce(4, 125, 0, 1);
  announce(5, 500, 0, 0);  // more than all of it: alone
  announce(6, 1, -1, -1);
  CHECK(granted() == "");
  CHECK(finish(1, 250) == "");
  CHECK(granted() == "34");
  CHECK(desk.engine.reserved_bytes() == 1000);
  (void)finish(3, 125);
  CHECK(granted() == "2");
  (void)finish(4, 125);
  CHECK(granted() == "");  // 5 is next and does not fit; 6 would
  (void)finish(2, 125);
  CHECK(granted() == "5");
  CHECK(desk.engine.reserved_bytes() == 2000);
  (void)finish(5, 500);
  CHECK(granted() == "6");
  (void)finish(6, 1);
  CHECK(desk.is_clean());
}

TEST_CASE("engine: hosts that disagree all learn it, and nothing stays") {
  const auto fails = [](const Frame& theirs) {
    Desk desk(options_of(3));
    REQUIRE(desk.send(1, ready(1, 1, 100)) == Errc::kOk);
    REQUIRE(desk.send(2, theirs, 1) == Errc::kOk);
    CHECK(desk.flush_hosts(3) == "");  // the third may be late
    REQUIRE(desk.send_local(ready(1, 1, 100)) == Errc::kOk);
    bool all = true;
    for (PeerId host = 0; host < 3; ++host) {
      const auto frames = desk.take(host);
      all = all && frames.size() == 1 && frames[0].frame.kind == FrameKind::kFail && frames[0].frame.round == 1 &&
            frames[0].frame.code == static_cast<std::uint8_t>(Errc::kMismatch);
      for (const OutFrame& out : frames) desk.sent(host, out);
    }
    return all && desk.is_clean();
  };
  CHECK_FALSE(fails(ready(1, 1, 100, 7)));  // priorities may differ
  CHECK(fails(with_hash(ready(1, 1, 100), 1)));
  CHECK(fails(ready(1, 1, 101)));
  CHECK(fails(with_hash(ready(1, 1, 9 * kPerGranule), 1)));  // other pieces
  CHECK(fails(with_hash(ready(1, 1, 0), 1)));
  CHECK(fails(with_hash(eager(1, 1, 50), 1)));
  Frame other = ready(1, 1, 100);
  other.flags = commlib::kFlagDisagree;
  CHECK(fails(other));
  other = ready(1, 1, 100);
  other.dtype = static_cast<std::uint8_t>(DType::kInt32);
  CHECK(fails(other));
  other = ready(1, 1, 100);
  other.op = static_cast<std::uint8_t>(commlib::ReduceOp::kMax);
  CHECK(fails(other));
  other = ready(1, 1, 100);
  other.start = 64;
  CHECK(fails(other));
  other = ready(1, 1, 100);
  other.whole = 0;
  CHECK(fails(other));
  CHECK(fails(broadcast_from(1, ready(1, 1, 100))));
}

TEST_CASE("engine: a broadcast has one contributor, which hears last that its bytes are no longer needed") {
  SUBCASE("from another host") {
    Desk desk(options_of(3));
    REQUIRE(desk.send_local(broadcast_from(2, ready(1, 1, 100))) == Errc::kOk);
    for (PeerId host = 1; host < 3; ++host) {
      REQUIRE(desk.send(host, broadcast_from(2, ready(1, 1, 100))) == Errc::kOk);
    }
    CHECK(desk.engine.reserved_bytes() == 400);
    for (PeerId host = 0; host < 3; ++host) CHECK(desk.flush(host) == "G");
    CHECK(desk.send(1, push(1, 1, 0, 100)) == Errc::kInternal);
    REQUIRE(desk.send(2, push(1, 1, 0, 100), 5) == Errc::kOk);
    const auto first = desk.take(0);
    const auto second = desk.take(1);
    REQUIRE(first.size() == 1);
    REQUIRE(second.size() == 1);
    CHECK(Desk::element(second[0], 99) == 5);
    desk.sent(0, first[0]);
    CHECK_FALSE(desk.egress.has(2));
    desk.sent(1, second[0]);
    const auto last = desk.take(2);
    REQUIRE(last.size() == 1);
    CHECK(last[0].frame.kind == FrameKind::kResult);
    CHECK(last[0].frame.payload_bytes == 0);
    CHECK(last[0].frame.count == 0);
    desk.sent(2, last[0]);
    CHECK(desk.is_clean());
  }
  SUBCASE("from the own host, whose memory is used where it lies") {
    Desk desk(options_of(3, 0, 0));
    for (PeerId host = 1; host < 3; ++host) {
      REQUIRE(desk.send(host, broadcast_from(0, ready(1, 1, 100))) == Errc::kOk);
    }
    REQUIRE(desk.send_local(broadcast_from(0, ready(1, 1, 100))) == Errc::kOk);
    CHECK(desk.engine.reserved_bytes() == 0);
    for (PeerId host = 0; host < 3; ++host) CHECK(desk.flush(host) == "G");
    REQUIRE(desk.send_local(push(1, 1, 0, 100), 6) == Errc::kOk);
    CHECK(desk.engine.slot_bytes() == 0);
    CHECK(desk.flush(0) == "");
    CHECK(desk.flush(1) == "R");
    CHECK(desk.flush(0) == "");
    const auto frames = desk.take(2);
    REQUIRE(frames.size() == 1);
    CHECK(Desk::element(frames[0], 0) == 6);
    desk.sent(2, frames[0]);
    desk.forget_local();
    CHECK(desk.flush(0) == "R");
    CHECK(desk.is_clean());
  }
  SUBCASE("eager: the others send nothing but their consent") {
    Desk desk(options_of(3));
    REQUIRE(desk.send(1, broadcast_from(1, eager(1, 1, 100)), 7) == Errc::kOk);
    REQUIRE(desk.send(2, broadcast_from(1, without_payload(eager(1, 1, 100)))) == Errc::kOk);
    REQUIRE(desk.send_local(broadcast_from(1, without_payload(eager(1, 1, 100)))) == Errc::kOk);
    CHECK(desk.flush(0) == "R");
    CHECK(desk.flush(1) == "");
    CHECK(desk.flush(2) == "R");
    CHECK(desk.flush(1) == "R");
    CHECK(desk.is_clean());
  }
  SUBCASE("the root's next announcement may overtake its pushes") {
    Desk desk(options_of(2));
    REQUIRE(desk.send_local(broadcast_from(1, ready(1, 1, 100))) == Errc::kOk);
    REQUIRE(desk.send(1, broadcast_from(1, ready(1, 1, 100))) == Errc::kOk);
    CHECK(desk.flush_hosts(2) == "GG");
    REQUIRE(desk.send(1, ready(1, 2, 100)) == Errc::kOk);
    REQUIRE(desk.send(1, push(1, 1, 0, 100), 7) == Errc::kOk);
    CHECK(desk.flush_hosts(2) == "RR");
  }
}

TEST_CASE("engine: a barrier is answered with nothing, to everybody") {
  for (const FrameKind kind : {FrameKind::kReady, FrameKind::kEager}) {
    Desk desk(options_of(2, 0, 0));
    for (std::uint64_t round = 1; round < 4; ++round) {
      REQUIRE(desk.send(1, barrier(kind, round)) == Errc::kOk);
      CHECK_FALSE(desk.egress.has(1));
      REQUIRE(desk.send_local(barrier(FrameKind::kEager, round)) == Errc::kOk);
      CHECK(desk.flush(0) == "R");
      CHECK(desk.flush(1) == (kind == FrameKind::kReady ? "GR" : "R"));
      CHECK(desk.is_clean());
    }
  }
}

TEST_CASE("engine: EAGER and READY may be mixed; only READY is granted and charged") {
  Desk desk(options_of(4));
  REQUIRE(desk.send_local(ready(1, 1, 100)) == Errc::kOk);
  REQUIRE(desk.send(1, eager(1, 1, 100), 1) == Errc::kOk);
  REQUIRE(desk.send(2, ready(1, 1, 100)) == Errc::kOk);
  REQUIRE(desk.send(3, eager(1, 1, 100), 1000) == Errc::kOk);
  CHECK(desk.engine.reserved_bytes() == 400);
  CHECK(desk.flush_hosts(4) == "GG");
  CHECK(desk.send(1, push(1, 1, 0, 100), 1) == Errc::kInternal);
  REQUIRE(desk.send(2, push(1, 1, 0, 100), 10) == Errc::kOk);
  REQUIRE(desk.send_local(push(1, 1, 0, 100), 100) == Errc::kOk);
  const auto frames = desk.take(3);
  REQUIRE(frames.size() == 1);
  CHECK(Desk::element(frames[0], 50) == 1111);
  desk.sent(3, frames[0]);
  CHECK(desk.flush_hosts(3) == "RRR");
  CHECK(desk.is_clean());
}

TEST_CASE("engine: empty tensors, announced either way") {
  Desk desk(options_of(2));
  REQUIRE(desk.send_local(eager(1, 1, 0)) == Errc::kOk);
  REQUIRE(desk.send(1, ready(1, 1, 0)) == Errc::kOk);
  CHECK(desk.flush(1) == "G");
  CHECK(desk.flush(0) == "");
  REQUIRE(desk.send(1, push(1, 1, 0, 0)) == Errc::kOk);
  CHECK(desk.flush_hosts(2) == "RR");
  CHECK(desk.is_clean());
}

TEST_CASE("engine: a fast host's next round has its own memory while a slow one has not read this one") {
  Desk desk(options_of(3));
  const auto run_round = [&desk](std::uint64_t round, float value) {
    REQUIRE(desk.send_local(eager(1, round, 100), value) == Errc::kOk);
    REQUIRE(desk.send(1, eager(1, round, 100), value) == Errc::kOk);
  };
  run_round(1, 1);
  REQUIRE(desk.send(2, eager(1, 1, 100), 1) == Errc::kOk);
  CHECK(desk.flush_hosts(2) == "RR");
  const auto slow = desk.take(2);  // half on its way to the slow host
  REQUIRE(slow.size() == 1);
  run_round(2, 50);
  CHECK(desk.engine.live_shares() == 2);
  CHECK(Desk::element(slow[0], 0) == 3);
  CHECK(Desk::element(slow[0], 99) == 3);
  desk.sent(2, slow[0]);
  REQUIRE(desk.send(2, eager(1, 2, 100), 50) == Errc::kOk);
  CHECK(desk.flush_hosts(3) == "RRR");
  CHECK(desk.is_clean());
}

TEST_CASE("engine: an eager budget is per host, and free again with the answer") {
  const std::uint32_t most = 128 * 1024 / 4;
  Desk desk(options_of(2));
  for (std::uint64_t key = 1; key <= 2; ++key) REQUIRE(desk.send(1, eager(key, 1, most / 2)) == Errc::kOk);
  REQUIRE(desk.send_local(eager(2, 1, most / 2)) == Errc::kOk);
  CHECK(desk.flush(0) == "R");
  REQUIRE(desk.send(1, eager(3, 1, most / 2)) == Errc::kOk);  // the answer to 2 is queued: it cannot know, but may
  REQUIRE(desk.send_local(with_hash(eager(3, 1, most / 2), 9)) == Errc::kOk);
  REQUIRE(desk.send(1, eager(4, 1, most / 2)) == Errc::kOk);  // 3 has failed
  Frame stale = eager(3, 1, 1);
  CHECK(desk.send(1, eager(5, 1, 1)) == Errc::kInternal);
  stale.round = 2;
  CHECK(desk.send(1, stale) == Errc::kInternal);
  CHECK(desk.send(1, eager(5, 1, 0)) == Errc::kOk);
}

TEST_CASE("engine: a broadcast's root has its eager budget back when all others have the bytes") {
  const std::uint32_t half = 64 * 1024 / 4;
  Desk desk(options_of(2));
  for (std::uint64_t round = 1; round < 8; ++round) {
    REQUIRE(desk.send(1, broadcast_from(1, eager(1, round, half))) == Errc::kOk);
    REQUIRE(desk.send_local(broadcast_from(1, without_payload(eager(1, round, half)))) == Errc::kOk);
    REQUIRE(desk.send(1, eager(2, round, half)) == Errc::kOk);
    CHECK(desk.send(1, eager(3, round, 1)) == Errc::kInternal);
    REQUIRE(desk.send_local(eager(2, round, half)) == Errc::kOk);
    CHECK(desk.flush_hosts(2) == "RRRR");
  }
}

TEST_CASE("engine: what is accumulated is answered at once, to its host alone, with all that has been added so far") {
  Desk desk(options_of(3));
  const auto answer = [&desk](PeerId host, std::uint32_t element) {
    const auto frames = desk.take(host);
    REQUIRE(frames.size() == 1);
    REQUIRE(frames[0].frame.kind == FrameKind::kResult);
    const float value = Desk::element(frames[0], element);
    desk.sent(host, frames[0]);
    return value;
  };
  REQUIRE(desk.send(1, accumulated_by(1, eager(1, 1, 10)), 1) == Errc::kOk);
  CHECK(answer(1, 9) == 1);
  REQUIRE(desk.send_local(accumulated_by(0, eager(1, 1, 10)), 2) == Errc::kOk);
  CHECK(answer(0, 9) == 3);
  // Rounds are each host's own.
  for (std::uint64_t round = 2; round < 6; ++round) {
    REQUIRE(desk.send(1, accumulated_by(1, eager(1, round, 10)), 10) == Errc::kOk);
    CHECK(answer(1, 0) == 3 + 10 * static_cast<float>(round - 1));
  }
  REQUIRE(desk.send(2, accumulated_by(2, ready(1, 1, 10))) == Errc::kOk);
  CHECK(desk.flush(2) == "G");
  REQUIRE(desk.send(2, accumulated_by(2, push(1, 1, 0, 10)), 100) == Errc::kOk);
  CHECK(answer(2, 5) == 143);
  CHECK(desk.flush_hosts(3) == "");
  CHECK(desk.is_clean());
}

TEST_CASE("engine: pieces of what is accumulated are granted and added one by one") {
  Desk desk(options_of(2, 0, 2 * kGranule));
  const std::uint32_t count = 4 * kPerGranule;  // pieces 0 and 2 are owner 0's
  REQUIRE(desk.send_local(accumulated_by(0, ready(1, 1, count))) == Errc::kOk);
  REQUIRE(desk.send(1, accumulated_by(1, ready(1, 7, count))) == Errc::kOk);
  CHECK(desk.flush_hosts(2) == "GG");
  REQUIRE(desk.send(1, accumulated_by(1, push(1, 7, 2 * kPerGranule, kPerGranule)), 1) == Errc::kOk);
  const auto on_its_way = desk.take(1);
  REQUIRE(on_its_way.size() == 1);
  REQUIRE(desk.send_local(accumulated_by(0, push(1, 1, 0, kPerGranule)), 2) == Errc::kOk);
  REQUIRE(desk.send_local(accumulated_by(0, push(1, 1, 2 * kPerGranule, kPerGranule)), 2) == Errc::kOk);
  const auto own = desk.take(0);
  REQUIRE(own.size() == 2);
  CHECK(Desk::element(own[0], 0) == 2);
  CHECK(Desk::element(own[1], kPerGranule - 1) == 3);
  CHECK(Desk::element(on_its_way[0], kPerGranule - 1) == 1);  // as it was
  for (const auto& out : own) desk.sent(0, out);
  desk.sent(1, on_its_way[0]);
  REQUIRE(desk.send(1, accumulated_by(1, push(1, 7, 0, kPerGranule)), 5) == Errc::kOk);
  CHECK(desk.flush(1) == "R");
  CHECK(desk.is_clean());
}

TEST_CASE("engine: a key is accumulated under, always in the same way, or never") {
  Desk desk(options_of(2));
  REQUIRE(desk.send(1, accumulated_by(1, eager(1, 1, 10)), 1) == Errc::kOk);
  CHECK(desk.flush(1) == "R");
  for (const Frame& other : {eager(1, 1, 11), ready(1, 1, 11), with_hash(eager(1, 1, 10), 1)}) {
    Desk same(options_of(2));
    REQUIRE(same.send(1, accumulated_by(1, eager(1, 1, 10)), 1) == Errc::kOk);
    REQUIRE(same.send_local(accumulated_by(0, other)) == Errc::kOk);
    CHECK(same.flush_hosts(2) == "FR");
    CHECK(same.is_clean());
  }
  REQUIRE(desk.send_local(eager(1, 1, 10)) == Errc::kOk);
  CHECK(desk.flush_hosts(2) == "F");
  REQUIRE(desk.send(1, ready(1, 2, 10)) == Errc::kOk);
  CHECK(desk.flush_hosts(2) == "F");
  REQUIRE(desk.send(1, accumulated_by(1, eager(1, 3, 10)), 1) == Errc::kOk);
  CHECK(desk.flush_hosts(2) == "R");
  // The other way round.
  REQUIRE(desk.send(1, eager(2, 1, 10)) == Errc::kOk);
  REQUIRE(desk.send_local(accumulated_by(0, eager(2, 1, 10))) == Errc::kOk);
  CHECK(desk.flush_hosts(2) == "F");
  REQUIRE(desk.send_local(eager(2, 2, 10)) == Errc::kOk);
  CHECK(desk.flush_hosts(2) == "F");  // host 1 will have heard elsewhere that round 1 has failed
}

TEST_CASE("engine: hosts that leave or are lost disturb nobody who accumulates") {
  Desk desk(options_of(3));
  REQUIRE(desk.send(1, accumulated_by(1, ready(1, 1, 10))) == Errc::kOk);
  REQUIRE(desk.send(2, accumulated_by(2, ready(1, 1, 10))) == Errc::kOk);
  CHECK(desk.flush_hosts(3) == "GG");
  desk.engine.on_peer_left(1, 17);
  desk.engine.on_peer_closed(1);  // halfway
  REQUIRE(desk.send(2, accumulated_by(2, push(1, 1, 0, 10)), 4) == Errc::kOk);
  REQUIRE(desk.send(2, accumulated_by(2, eager(1, 2, 10)), 4) == Errc::kOk);
  REQUIRE(desk.send_local(accumulated_by(0, eager(1, 1, 10)), 4) == Errc::kOk);
  CHECK(desk.flush_hosts(3) == "RRR");
  CHECK(desk.is_clean());
}

// So all owners grant as much of a tensor, and no connection gets far ahead of others.
TEST_CASE("engine: an owner of less has a smaller budget") {
  constexpr std::uint32_t kHosts = 4;
  constexpr std::uint64_t kBudget = 6 << 20;
  for (const PeerId self : {PeerId{0}, PeerId{kHosts}}) {
    CAPTURE(self);
    commlib::EngineOptions options = options_of(kHosts, self, kBudget);
    options.servers = 2;  // which own three times as much as a host, and receive from four hosts instead of three
    Desk desk(options);
    for (std::uint64_t key = 1; key <= 100; ++key) {
      const Frame frame = ready(key, 1, 16 * kPerGranule);
      for (PeerId host = 0; host < kHosts; ++host) {
        REQUIRE((host == self ? desk.send_local(frame) : desk.send(host, frame)) == Errc::kOk);
      }
    }
    // A turn of the owners is ten granules.
    const std::uint64_t budget = self < kHosts ? kBudget / 4 : kBudget;
    const std::uint64_t share = self < kHosts ? 2 * 3 * kGranule : 6 * 4 * kGranule;
    CHECK(desk.engine.reserved_bytes() <= budget);
    CHECK(desk.engine.reserved_bytes() > budget - share);
  }
}
