// SPDX-License-Identifier: Apache-2.0
// Whatever a host sends, the engine says kInternal or makes something of it, and holds nothing when all is over.
#include <doctest/doctest.h>

#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "desk.hpp"

using commlib::test::tried;
using desk::Collective;
using desk::Desk;
using desk::DType;
using desk::eager;
using desk::Errc;
using desk::Frame;
using desk::FrameKind;
using desk::kGranule;
using desk::options_of;
using desk::OutFrame;
using desk::PeerId;
using desk::push;
using desk::ready;

namespace {

using Change = std::function<void(Frame&)>;

struct Unsent {
  PeerId to;
  OutFrame out;
  std::vector<std::byte> payload;  // as it was when the frame was taken

  Unsent(PeerId peer, const OutFrame& taken)
      : to(peer), out(taken), payload(taken.payload, taken.payload + taken.frame.payload_bytes) {}
  [[nodiscard]] bool is_unchanged() const {
    return payload.empty() || std::memcmp(payload.data(), out.payload, payload.size()) == 0;
  }
};

}  // namespace

TEST_CASE("engine: announcements that make no sense") {
  const std::vector<Change> nonsense = {
      [](Frame& frame) { frame.round = 0; },
      [](Frame& frame) { frame.dtype = 10; },
      [](Frame& frame) { frame.dtype = 255; },
      [](Frame& frame) { frame.op = 5; },
      [](Frame& frame) { frame.collective = static_cast<Collective>(4); },
      [](Frame& frame) { frame.start = 63; },
      [](Frame& frame) { frame.start = UINT64_MAX - 63; },
      [](Frame& frame) { frame.start = std::uint64_t{1} << 62; },
      [](Frame& frame) { frame.count = (1 << 20) / 4 + 1; },
      [](Frame& frame) { frame.count = UINT64_MAX; },
      [](Frame& frame) { frame.count = UINT64_MAX / 4 + 2; },
      [](Frame& frame) { frame.whole = 2; },
      [](Frame& frame) { frame.whole = 1, frame.count = kGranule / 4 + 1; },
      [](Frame& frame) { frame.dtype = 0, frame.op = 0; },  // the average of bool
      [](Frame& frame) { frame.collective = Collective::kBroadcast, frame.member = 2; },
      [](Frame& frame) { frame.collective = Collective::kBarrier; },
      [](Frame& frame) { frame.collective = Collective::kAccumulate; },  // of the own host
      [](Frame& frame) { frame.collective = Collective::kAccumulate, frame.member = 2; },
      [](Frame& frame) { frame.collective = Collective::kAccumulate, frame.member = 1, frame.op = 3; },
      [](Frame& frame) { frame.collective = Collective::kAccumulate, frame.member = 1, frame.dtype = 6; },
      [](Frame& frame) { frame.collective = Collective::kAccumulate, frame.member = 1, frame.dtype = 4; },
      [](Frame& frame) { frame.start = kGranule; },  // host 1's own
      [](Frame& frame) { frame.payload_bytes = 4; },
      [](Frame& frame) { frame.payload_bytes = UINT32_MAX; },
  };
  for (const bool is_eager : {false, true}) {
    Desk desk(options_of(2));
    for (std::size_t i = 0; i < nonsense.size(); ++i) {
      CAPTURE(i);
      Frame frame = is_eager ? eager(1, 1, 10) : ready(1, 1, 10);
      frame.flags = commlib::kFlagDisagree;  // excuses no field
      nonsense[i](frame);
      CHECK(desk.send(1, frame) == Errc::kInternal);
      frame.flags = 0;
      CHECK(desk.send(1, frame) == Errc::kInternal);
      CHECK(desk.is_clean());
    }
    Frame frame = eager(1, 1, 10);
    frame.whole = 0;
    CHECK(desk.send(1, frame) == Errc::kInternal);
    frame = eager(1, 1, 10);
    frame.payload_bytes = 0;
    CHECK(desk.send(1, frame) == Errc::kInternal);
    CHECK(desk.is_clean());
  }
}

TEST_CASE("engine: an announcement may not come twice") {
  Desk desk(options_of(2));
  REQUIRE(desk.send(1, ready(1, 1, 10)) == Errc::kOk);
  CHECK(desk.send(1, ready(1, 1, 10)) == Errc::kInternal);
  CHECK(desk.send(1, eager(1, 1, 10)) == Errc::kInternal);
  REQUIRE(desk.send_local(ready(1, 1, 10)) == Errc::kOk);
  CHECK(desk.send_local(ready(1, 1, 10)) == Errc::kInternal);
  CHECK(desk.send(1, ready(1, 1, 10)) == Errc::kInternal);  // granted
  REQUIRE(desk.send(1, push(1, 1, 0, 10)) == Errc::kOk);
  REQUIRE(desk.send_local(push(1, 1, 0, 10)) == Errc::kOk);
  CHECK(desk.send(1, ready(1, 1, 10)) == Errc::kInternal);  // answered
  CHECK(desk.flush_hosts(2) == "GRGR");
  CHECK(desk.send(1, ready(1, 1, 10)) == Errc::kInternal);  // over
  CHECK(desk.is_clean());
}

TEST_CASE("engine: pushes that nobody waits for") {
  const std::uint64_t count = 5 * kGranule / 4;  // with two hosts, pieces 0, 2 and 4 are owner 0's
  const std::uint32_t piece = kGranule / 4;
  Desk desk(options_of(2, 0, 4 * kGranule));
  CHECK(desk.send(1, push(1, 1, 0, piece)) == Errc::kInternal);  // unknown
  REQUIRE(desk.send(1, ready(1, 1, count)) == Errc::kOk);
  CHECK(desk.send(1, push(1, 1, 0, piece)) == Errc::kInternal);  // not granted
  REQUIRE(desk.send_local(ready(1, 1, count)) == Errc::kOk);
  REQUIRE(desk.send(1, ready(2, 1, count)) == Errc::kOk);
  REQUIRE(desk.send_local(ready(2, 1, count)) == Errc::kOk);
  CHECK(desk.send(1, push(2, 1, 0, piece)) == Errc::kInternal);  // waits for budget

  CHECK(desk.send(1, push(1, 2, 0, piece)) == Errc::kInternal);
  CHECK(desk.send(1, push(1, 0, 0, piece)) == Errc::kInternal);
  CHECK(desk.send(1, push(1, 1, piece, piece)) == Errc::kInternal);  // another owner's
  CHECK(desk.send(1, push(1, 1, 1, piece)) == Errc::kInternal);
  CHECK(desk.send(1, push(1, 1, 6 * piece, piece)) == Errc::kInternal);
  CHECK(desk.send(1, push(1, 1, UINT64_MAX, piece)) == Errc::kInternal);
  CHECK(desk.send(1, push(1, 1, 0, piece - 1)) == Errc::kInternal);
  CHECK(desk.send(1, push(1, 1, 0, 2 * piece)) == Errc::kInternal);
  CHECK(desk.send(1, push(1, 1, 0, 0)) == Errc::kInternal);
  Frame frame = push(1, 1, 0, piece);
  frame.payload_bytes -= 4;
  CHECK(desk.send(1, frame) == Errc::kInternal);
  frame.payload_bytes = 0;
  CHECK(desk.send(1, frame) == Errc::kInternal);
  frame = push(1, 1, 0, piece);
  frame.count += std::uint64_t{1} << 32;
  CHECK(desk.send(1, frame) == Errc::kInternal);
  CHECK(desk.engine.slot_bytes() == 0);

  REQUIRE(desk.send(1, push(1, 1, 0, piece)) == Errc::kOk);
  CHECK(desk.send(1, push(1, 1, 0, piece)) == Errc::kInternal);  // twice
  std::byte* into = nullptr;
  std::byte* again = nullptr;
  const Frame second = push(1, 1, 2 * piece, piece);
  REQUIRE(desk.engine.on_header(1, second, &into) == Errc::kOk);
  REQUIRE(desk.engine.on_header(1, second, &again) == Errc::kOk);  // at once on two streams
  CHECK(into != again);
  CHECK(desk.engine.on_frame(1, second) == Errc::kOk);
  CHECK(desk.engine.on_frame(1, second) == Errc::kInternal);
  CHECK(desk.engine.on_frame(1, push(1, 1, 4 * piece, piece)) == Errc::kInternal);  // no header
  desk.engine.on_peer_closed(1);
  desk.egress.discard(1);
  (void)desk.flush(0);
  CHECK(desk.is_clean());
}

TEST_CASE("engine: any frames whatever") {
  for (std::uint64_t seed = 0; seed < tried(600); ++seed) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    const auto pick = [&random](std::initializer_list<std::uint64_t> from) {
      return from.begin()[random() % from.size()];
    };
    const auto hosts = static_cast<std::uint32_t>(2 + random() % 3);
    const bool dedicated = random() % 4 == 0;
    auto options = options_of(hosts, dedicated ? hosts : 0, pick({0, 1000, 1 << 20}));
    Desk desk(options);
    std::vector<Unsent> unsent;
    for (int step = 0; step < 400; ++step) {
      Frame frame;
      const std::uint64_t item = pick({1, 2, 4, 8});
      frame.kind = static_cast<FrameKind>(random() % 16 == 0 ? random() : pick({1, 1, 2, 2, 4, 4, 4}));
      frame.flags = random() % 16 == 0 ? static_cast<std::uint8_t>(random()) : 0;
      frame.key = 1 + random() % 2;
      frame.round = random() % 32 == 0 ? random() : 1 + random() % 3;
      frame.hash = random() % 12 == 0;
      const bool is_push = frame.kind == FrameKind::kPush;
      frame.start = is_push ? pick({0, 0, 0, kGranule / item, 100, random()}) : pick({0, 0, 0, 64, kGranule, random()});
      frame.count = pick({0, 1, 100, 100, 100, kGranule / item, 3 * kGranule / item, random()});
      frame.dtype = static_cast<std::uint8_t>(random() % 12 == 0 ? random() : pick({2, 4, 8, 8, 8, 9}));
      frame.op = static_cast<std::uint8_t>(random() % 12 == 0 ? random() : random() % 2);
      frame.collective = static_cast<Collective>(random() % 32 == 0 ? random() : pick({0, 0, 0, 0, 1, 2}));
      frame.priority = static_cast<std::int32_t>(random());
      frame.member = static_cast<std::uint32_t>(random() % 16 == 0 ? random() : random() % hosts);
      frame.whole = static_cast<std::uint32_t>(random() % 16 == 0 ? random() : frame.count <= 100);
      if (is_push || frame.kind == FrameKind::kEager || random() % 16 == 0) {
        frame.payload_bytes =
            static_cast<std::uint32_t>(random() % 16 == 0 ? random() : frame.count * pick({4, 4, 4, 8}));
      }
      const auto from = static_cast<PeerId>(random() % (hosts + 1));
      if (random() % 8 == 0) {
        std::byte* into = nullptr;
        (void)desk.engine.on_header(from, frame, &into);  // its frame may never come
      } else if (from == 0 && !dedicated) {
        frame.payload_bytes %= 3 * kGranule;
        (void)desk.send_local(frame);
      } else {
        (void)desk.send(from, frame);
      }
      if (random() % 200 == 0) desk.engine.on_peer_left(static_cast<PeerId>(random() % (hosts + 1)), 3);
      if (random() % 800 == 0) {
        const auto peer = static_cast<PeerId>(random() % hosts);
        desk.engine.on_peer_closed(peer);
        desk.egress.discard(peer);
        std::erase_if(unsent, [peer](const Unsent& entry) { return entry.to == peer; });
      }
      for (PeerId host = 0; host < hosts; ++host) {
        OutFrame out;
        if (random() % 2 == 0 && desk.egress.next(host, &out)) unsent.emplace_back(host, out);
      }
      while (!unsent.empty() && random() % 2 == 0) {
        const std::size_t i = random() % unsent.size();
        REQUIRE(unsent[i].is_unchanged());
        desk.sent(unsent[i].to, unsent[i].out);
        unsent.erase(unsent.begin() + static_cast<std::ptrdiff_t>(i));
      }
    }
    for (PeerId host = 0; host < hosts; ++host) {
      desk.engine.on_peer_closed(host);
      desk.egress.discard(host);
    }
    REQUIRE(desk.is_clean());
  }
}

TEST_CASE("engine: frames that are not for owners, or not from hosts, are malformed") {
  commlib::EngineOptions options = options_of(2);
  options.servers = 1;
  Desk desk(options);
  for (int kind = 0; kind < 256; ++kind) {
    Frame frame = ready(1, 1, 10);
    frame.start = kGranule;
    frame.kind = static_cast<FrameKind>(kind);
    const bool is_ready = frame.kind == FrameKind::kReady;
    CHECK(desk.send(2, frame) == Errc::kInternal);
    CHECK(desk.send(0, frame) == Errc::kInternal);
    CHECK(desk.send(3, frame) == Errc::kInternal);
    CHECK(desk.send(UINT32_MAX, frame) == Errc::kInternal);
    CHECK(desk.send(1, frame) == (is_ready ? Errc::kOk : Errc::kInternal));
    frame.payload_bytes = 40;
    frame.round = 3;
    CHECK(desk.send(1, frame) == (frame.kind == FrameKind::kEager ? Errc::kOk : Errc::kInternal));
  }
}

TEST_CASE("engine: a local frame without its payload is a bug of the caller") {
  Desk desk(options_of(2));
  CHECK(desk.engine.on_local({eager(1, 1, 10), nullptr, nullptr}) == Errc::kInternal);
  CHECK(desk.engine.on_local({eager(1, 1, 0), nullptr, nullptr}) == Errc::kOk);
}

TEST_CASE("engine: the log says who sent what, and why it is wrong") {
  Desk desk(options_of(2));
  REQUIRE(desk.send(1, push(7, 3, 0, 10)) == Errc::kInternal);
  commlib::LogRecord record;
  REQUIRE(desk.log.take(&record));
  CHECK(record.level == commlib::LogLevel::kError);
  CHECK(std::string(record.text) ==
        "node 1 sent a malformed frame (kind 4, key 458752, round 3) to node 0: unknown key");
  CHECK_FALSE(desk.log.take(&record));
}
