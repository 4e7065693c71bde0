// SPDX-License-Identifier: Apache-2.0
// What fails and what still ends well: rounds that are over elsewhere, hosts that leave or are lost, no memory.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <string>

#include "desk.hpp"

using desk::broadcast_from;
using desk::Desk;
using desk::eager;
using desk::Errc;
using desk::Frame;
using desk::FrameKind;
using desk::kGranule;
using desk::kPerGranule;
using desk::options_of;
using desk::PeerId;
using desk::push;
using desk::ready;
using desk::with_hash;

TEST_CASE("engine: the round after a mismatch works") {
  Desk desk(options_of(2));
  REQUIRE(desk.send_local(with_hash(ready(1, 1, 10), 1)) == Errc::kOk);
  REQUIRE(desk.send(1, with_hash(ready(1, 1, 10), 2)) == Errc::kOk);
  CHECK(desk.flush_hosts(2) == "FF");
  REQUIRE(desk.send_local(eager(1, 2, 10), 1) == Errc::kOk);
  REQUIRE(desk.send(1, eager(1, 2, 10), 2) == Errc::kOk);
  CHECK(desk.flush_hosts(2) == "RR");
  CHECK(desk.is_clean());
}

TEST_CASE("engine: an announcement of the next round ends what is left of older ones") {
  Desk desk(options_of(3));
  REQUIRE(desk.send(1, eager(1, 1, 100)) == Errc::kOk);
  REQUIRE(desk.send(2, ready(1, 1, 100)) == Errc::kOk);
  CHECK(desk.engine.live_shares() == 1);
  // Host 1 has learnt elsewhere that round 1 has failed.
  REQUIRE(desk.send(1, ready(1, 2, 100)) == Errc::kOk);
  CHECK(desk.engine.live_shares() == 1);
  CHECK(desk.engine.slot_bytes() == 0);
  CHECK(desk.flush(1) == "F");
  CHECK(desk.flush(2) == "F");
  // The own host comes late to round 1.
  REQUIRE(desk.send_local(eager(1, 1, 100)) == Errc::kOk);
  CHECK(desk.flush(0) == "F");
  // Round 2 is none the worse. Its end is not either when an announcement of round 1 comes that others have overtaken.
  REQUIRE(desk.send(2, ready(1, 2, 100)) == Errc::kOk);
  REQUIRE(desk.send_local(ready(1, 2, 100)) == Errc::kOk);
  CHECK(desk.flush_hosts(3) == "GGG");
  REQUIRE(desk.send_local(push(1, 2, 0, 100)) == Errc::kOk);
  for (PeerId host = 1; host < 3; ++host) REQUIRE(desk.send(host, push(1, 2, 0, 100)) == Errc::kOk);
  CHECK(desk.flush_hosts(3) == "RRR");
  REQUIRE(desk.send(1, eager(1, 1, 100)) == Errc::kOk);
  CHECK(desk.flush(1) == "F");
  CHECK(desk.is_clean());
}

TEST_CASE("engine: what is left of a granted round ends too, and late pushes for it are swallowed") {
  Desk desk(options_of(3, 0, 800));
  REQUIRE(desk.send_local(ready(1, 1, 100)) == Errc::kOk);
  for (PeerId host = 1; host < 3; ++host) REQUIRE(desk.send(host, ready(1, 1, 100)) == Errc::kOk);
  for (PeerId host = 0; host < 3; ++host) CHECK(desk.flush(host) == "G");
  // Another one waits for its budget.
  REQUIRE(desk.send_local(ready(2, 1, 100)) == Errc::kOk);
  for (PeerId host = 1; host < 3; ++host) REQUIRE(desk.send(host, ready(2, 1, 100)) == Errc::kOk);
  CHECK_FALSE(desk.egress.has(1));
  REQUIRE(desk.send(1, push(1, 1, 0, 100)) == Errc::kOk);
  std::byte* into = nullptr;
  const Frame late = push(1, 1, 0, 100);
  REQUIRE(desk.engine.on_header(2, late, &into) == Errc::kOk);
  REQUIRE(desk.send(1, ready(1, 2, 100)) == Errc::kOk);
  for (PeerId host = 0; host < 3; ++host) CHECK(desk.flush(host) == "FG");  // and the other one is granted
  std::memset(into, 1, 400);
  CHECK(desk.engine.on_frame(2, late) == Errc::kOk);
  CHECK(desk.send_local(push(1, 1, 0, 100)) == Errc::kOk);
  CHECK(desk.send(2, late) == Errc::kOk);
  CHECK(desk.engine.slot_bytes() == 0);
  CHECK_FALSE(desk.egress.has(0));
}

TEST_CASE("engine: a broadcast that fails halfway tells its root when nothing refers to the root's memory any more") {
  Desk desk(options_of(3));
  const std::uint64_t count = 4 * kPerGranule;  // two pieces are owner 0's
  REQUIRE(desk.send_local(broadcast_from(0, ready(1, 1, count))) == Errc::kOk);
  for (PeerId host = 1; host < 3; ++host) {
    REQUIRE(desk.send(host, broadcast_from(0, ready(1, 1, count))) == Errc::kOk);
  }
  CHECK(desk.flush_hosts(3) == "GGG");
  REQUIRE(desk.send_local(push(1, 1, 0, kPerGranule), 8) == Errc::kOk);
  const auto on_its_way = desk.take(1);
  REQUIRE(on_its_way.size() == 1);
  REQUIRE(desk.send(2, ready(1, 2, 10)) == Errc::kOk);  // it has failed elsewhere
  CHECK(desk.flush(2) == "FR");
  CHECK(desk.flush(1) == "F");
  CHECK_FALSE(desk.egress.has(0));
  CHECK(Desk::element(on_its_way[0], kPerGranule - 1) == 8);
  desk.sent(1, on_its_way[0]);
  desk.forget_local();
  CHECK(desk.flush(0) == "F");
  CHECK(desk.engine.live_shares() == 1);  // round 2
}

TEST_CASE("engine: an eager budget is not used up by announcements that come too late") {
  const std::uint32_t half = 64 * 1024 / 4;
  Desk desk(options_of(3));
  REQUIRE(desk.send(2, ready(1, 100, 10)) == Errc::kOk);
  for (std::uint64_t round = 1; round < 8; ++round) {
    REQUIRE(desk.send(1, eager(1, round, half)) == Errc::kOk);
    CHECK(desk.flush(1) == "F");
  }
  REQUIRE(desk.send(1, eager(1, 101, half)) == Errc::kOk);
  for (std::uint64_t round = 102; round < 108; ++round) {
    REQUIRE(desk.send(1, eager(1, round, half)) == Errc::kOk);  // ends what it said before
    CHECK(desk.flush(1) == "F");
  }
}

TEST_CASE("engine: what not all hosts have announced when one leaves fails, now and later") {
  Desk desk(options_of(3));
  REQUIRE(desk.send(1, eager(1, 1, 10), 1) == Errc::kOk);  // with the leaver
  REQUIRE(desk.send(2, eager(1, 1, 10), 1) == Errc::kOk);
  REQUIRE(desk.send(1, ready(2, 1, 10)) == Errc::kOk);  // without
  REQUIRE(desk.send_local(ready(2, 1, 10)) == Errc::kOk);
  desk.engine.on_peer_left(2, 17);
  const std::vector<std::vector<std::uint64_t>> keys_that_fail = {{2}, {1, 2}, {1}};
  for (PeerId host = 0; host < 3; ++host) {
    const auto frames = desk.take(host);
    std::vector<std::uint64_t> keys;
    for (const auto& out : frames) {
      CHECK(out.frame.kind == FrameKind::kFail);
      CHECK(out.frame.code == static_cast<std::uint8_t>(Errc::kPeerLost));
      CHECK(out.frame.member == 17);
      keys.push_back(out.frame.key >> 16);
      desk.sent(host, out);
    }
    std::sort(keys.begin(), keys.end());
    CHECK(keys == keys_that_fail[host]);
  }
  REQUIRE(desk.send_local(eager(1, 1, 10), 1) == Errc::kOk);
  CHECK(desk.flush(0) == "F");
  CHECK(desk.is_clean());
  REQUIRE(desk.send(1, eager(1, 2, 10)) == Errc::kOk);
  CHECK(desk.flush(1) == "F");
  REQUIRE(desk.send_local(ready(1, 2, 10)) == Errc::kOk);
  CHECK(desk.flush(0) == "F");
  CHECK(desk.is_clean());
  desk.engine.on_peer_closed(2);
  REQUIRE(desk.send(1, eager(1, 3, 10)) == Errc::kOk);  // the job is not over
  CHECK(desk.flush(1) == "F");
}

TEST_CASE("engine: a host that has left and is closed owes nothing and gets nothing") {
  Desk desk(options_of(3));
  for (const std::uint64_t key : {1, 2}) {
    REQUIRE(desk.send_local(ready(key, 1, 100)) == Errc::kOk);
    for (PeerId host = 1; host < 3; ++host) REQUIRE(desk.send(host, ready(key, 1, 100)) == Errc::kOk);
    for (PeerId host = 0; host < 3; ++host) CHECK(desk.flush(host) == "G");
  }
  // It has pushed all of 1 and nothing of 2.
  REQUIRE(desk.send(2, push(1, 1, 0, 100), 1) == Errc::kOk);
  desk.engine.on_peer_left(2, 17);
  CHECK(desk.engine.live_shares() == 2);
  desk.engine.on_peer_closed(2);
  desk.egress.discard(2);
  CHECK(desk.flush_hosts(2) == "FF");
  CHECK(desk.send(1, push(2, 1, 0, 100), 1) == Errc::kOk);  // it could not know yet
  REQUIRE(desk.send(1, push(1, 1, 0, 100), 1) == Errc::kOk);
  REQUIRE(desk.send_local(push(1, 1, 0, 100), 1) == Errc::kOk);
  CHECK(desk.flush_hosts(2) == "RR");
  CHECK(desk.is_clean());
}

TEST_CASE("engine: answers to a host that is gone are not waited for") {
  Desk desk(options_of(3));
  REQUIRE(desk.send_local(broadcast_from(1, ready(1, 1, 100))) == Errc::kOk);
  for (PeerId host = 1; host < 3; ++host) {
    REQUIRE(desk.send(host, broadcast_from(1, ready(1, 1, 100))) == Errc::kOk);
  }
  for (PeerId host = 0; host < 3; ++host) CHECK(desk.flush(host) == "G");
  REQUIRE(desk.send(1, push(1, 1, 0, 100), 1) == Errc::kOk);
  const auto unsent = desk.take(2);
  REQUIRE(unsent.size() == 1);
  desk.engine.on_peer_left(2, 5);
  desk.engine.on_peer_closed(2);
  desk.egress.discard(2);
  desk.engine.on_sent(2, unsent[0]);  // too late, and harmless
  CHECK(desk.engine.slot_bytes() == 512);
  CHECK_FALSE(desk.egress.has(1));
  CHECK(desk.flush(0) == "R");
  CHECK(desk.flush(1) == "R");
  desk.engine.on_sent(2, unsent[0]);
  CHECK(desk.is_clean());
}

TEST_CASE("engine: a piece that nobody is left to receive is done at once") {
  Desk desk(options_of(2, 2));
  Frame announcement = broadcast_from(0, ready(1, 1, 100));  // the turns are 2, 0, 1, 2
  for (PeerId host = 0; host < 2; ++host) {
    REQUIRE(desk.send(host, announcement) == Errc::kOk);
  }
  CHECK(desk.flush_hosts(2) == "GG");
  desk.engine.on_peer_left(1, 1);
  desk.engine.on_peer_closed(1);
  desk.egress.discard(1);
  REQUIRE(desk.send(0, push(1, 1, 0, 100)) == Errc::kOk);
  CHECK(desk.flush(0) == "R");
  CHECK(desk.is_clean());
}

TEST_CASE("engine: when a host is lost the job is over, and memory is free as soon as no frame needs it") {
  Desk desk(options_of(3));
  const std::uint64_t count = 3 * kPerGranule + 100;  // two pieces are owner 0's
  for (const std::uint64_t key : {1, 2, 3}) {
    REQUIRE(desk.send_local(ready(key, 1, count)) == Errc::kOk);
    for (PeerId host = 1; host < 3; ++host) REQUIRE(desk.send(host, ready(key, 1, count)) == Errc::kOk);
    for (PeerId host = 0; host < 3; ++host) CHECK(desk.flush(host) == "G");
  }
  REQUIRE(desk.send(1, eager(4, 1, 100), 1) == Errc::kOk);
  for (PeerId host = 1; host < 3; ++host) REQUIRE(desk.send(host, push(1, 1, 3 * kPerGranule, 100), 1) == Errc::kOk);
  REQUIRE(desk.send_local(push(1, 1, 3 * kPerGranule, 100), 1) == Errc::kOk);
  REQUIRE(desk.send(1, push(1, 1, 0, kPerGranule), 1) == Errc::kOk);
  CHECK(desk.flush(0) == "R");
  const auto to_one = desk.take(1);
  const auto to_two = desk.take(2);
  REQUIRE(to_one.size() == 1);
  std::byte* from_one = nullptr;
  std::byte* from_two = nullptr;
  REQUIRE(desk.send(1, push(2, 1, 3 * kPerGranule, 100), 1) == Errc::kOk);
  REQUIRE(desk.engine.on_header(1, push(3, 1, 3 * kPerGranule, 100), &from_one) == Errc::kOk);
  REQUIRE(desk.engine.on_header(2, push(3, 1, 3 * kPerGranule, 100), &from_two) == Errc::kOk);

  desk.engine.on_peer_closed(2);
  desk.egress.discard(2);
  desk.forget_local();
  CHECK(desk.engine.live_shares() == 1);
  CHECK(desk.engine.slot_bytes() == 2 * 512);  // the answer, and what host 1 is sending
  CHECK(Desk::element(to_one[0], 7) == 3);
  std::memset(from_one, 1, 400);  // still arriving
  CHECK(desk.engine.on_frame(1, push(3, 1, 3 * kPerGranule, 100)) == Errc::kOk);
  CHECK(desk.send(1, ready(9, 1, 100)) == Errc::kOk);
  CHECK(desk.send(1, push(2, 1, 3 * kPerGranule, 100)) == Errc::kOk);
  CHECK(desk.send_local(ready(9, 1, 100)) == Errc::kOk);
  desk.sent(1, to_one[0]);
  CHECK(desk.is_clean());
  CHECK(desk.send(2, ready(9, 1, 100)) == Errc::kInternal);
  CHECK(to_two.size() == 1);
}

TEST_CASE("engine: what is complete when the job ends is answered to those who are still there") {
  Desk desk(options_of(4));
  for (PeerId host = 1; host < 4; ++host) {
    REQUIRE(desk.send(host, broadcast_from(1, host == 1 ? eager(1, 1, 100) : ready(1, 1, 100)), 1) == Errc::kOk);
  }
  REQUIRE(desk.send_local(broadcast_from(1, ready(1, 1, 100))) == Errc::kOk);
  CHECK(desk.flush(0) == "GR");
  CHECK(desk.flush(2) == "GR");
  desk.engine.on_peer_closed(2);
  CHECK(desk.engine.live_shares() == 1);
  CHECK(desk.flush(3) == "GR");
  CHECK(desk.flush(1) == "R");
  CHECK(desk.is_clean());
}

TEST_CASE("engine: losing a server ends the job, its leaving does not") {
  commlib::EngineOptions options = options_of(2);
  options.servers = 1;
  for (const bool in_order : {true, false}) {
    Desk desk(options);
    Frame announcement = eager(1, 1, 10);
    announcement.start = kGranule;  // the turns are 2, 0, 1, 2
    REQUIRE(desk.send_local(announcement) == Errc::kOk);
    if (in_order) desk.engine.on_peer_left(2, commlib::kServerBit);
    desk.engine.on_peer_closed(2);
    CHECK(desk.send(1, announcement) == Errc::kOk);
    CHECK(desk.flush_hosts(2) == (in_order ? "RR" : ""));
    CHECK(desk.is_clean());
  }
}

TEST_CASE("engine: without memory it ends the job and says so to everybody") {
  for (int survives = 0; survives < 3; ++survives) {
    Desk desk(options_of(3));
    for (PeerId host = 1; host < 3; ++host) REQUIRE(desk.send(host, eager(1, 1, 100)) == Errc::kOk);
    REQUIRE(desk.send(1, ready(2, 1, 100)) == Errc::kOk);
    // Stands for a queue that cannot grow.
    int left = survives;
    desk.egress.set_notify([&left](PeerId) {
      if (left-- == 0) throw std::bad_alloc();
    });
    CHECK(desk.send_local(eager(1, 1, 100)) == Errc::kOutOfMemory);
    CHECK(desk.send_local(ready(2, 1, 100)) == Errc::kOutOfMemory);
    CHECK(desk.send(1, ready(3, 1, 100)) == Errc::kOutOfMemory);
    CHECK(desk.send(1, eager(3, 1, 100)) == Errc::kOutOfMemory);
    desk.engine.on_peer_left(2, 1);
    desk.engine.on_peer_closed(2);
    desk.engine.on_peer_closed(1);
    desk.engine.on_peer_closed(0);
    CHECK(desk.engine.reserved_bytes() == 0);
    commlib::LogRecord record;
    REQUIRE(desk.log.take(&record));
    CHECK(std::string(record.text) == "node 0: no memory left for the server engine");
  }
}
