// SPDX-License-Identifier: Apache-2.0
// The contract of src/transport/transport.hpp as tests. A kit brings a transport under it:
//
//     struct Kit {
//       static constexpr std::size_t kBulkBytes = …;  // how much to move where much is wanted
//       static std::unique_ptr<World> make(PeerId endpoints, std::uint32_t streams);
//     };
//     COMMLIB_TRANSPORT_SUITE(Kit, OtherKit);
#pragma once

#include <algorithm>
#include <random>

#include "world.hpp"

namespace commlib::test {

constexpr std::uint32_t kBlock = 64 * 1024;

// ---- Moving frames

TEST_CASE_TEMPLATE_DEFINE("transport: frames of every size arrive intact and in order", Kit, transport_sizes) {
  const auto world = Kit::make(2, 1);
  std::vector<std::uint32_t> sizes = {0, 1, 63, 64, 65, 4031, 4032, 4033, 4096, 65535, 65536, 65537, kMaxPayloadBytes};
  std::mt19937 random(7);
  for (int i = 0; i < 100; ++i) sizes.push_back(random() % 9000);
  for (int i = 0; i < 50; ++i) sizes.push_back(0);
  std::uint64_t bytes = 0;
  for (const std::uint32_t size : sizes) {
    world->send(0, 1, size);
    bytes += sizeof(Frame) + size;
  }
  CHECK(world->run_until([&] { return world->sink(0).sent(1) == sizes.size(); }));
  CHECK(world->run_until([&] { return world->sink(1).received(0).size() == sizes.size(); }));
  CHECK(world->has_all_in_order(1, 0, sizes.size()));
  const TransportCounters out = world->at(0).counters(1);
  const TransportCounters in = world->at(1).counters(0);
  CHECK(out.frames_sent == sizes.size());
  CHECK(out.bytes_sent == bytes);
  CHECK(in.frames_received == sizes.size());
  CHECK(in.bytes_received == bytes);
  CHECK(out.frames_received + in.frames_sent == 0);
  world->check_contract();
}

TEST_CASE_TEMPLATE_DEFINE("transport: both sides send more than any buffer holds", Kit, transport_both_ways) {
  for (const std::uint32_t streams : {1u, 4u}) {
    const auto world = Kit::make(2, streams);
    const std::size_t count = Kit::kBulkBytes / kBlock;
    for (std::size_t i = 0; i < count; ++i) {
      world->send(0, 1, kBlock);
      world->send(1, 0, kBlock);
    }
    CHECK(world->run_until([&] { return world->sink(0).sent(1) == count && world->sink(1).sent(0) == count; }));
    CHECK(world->run_until([&] { return world->has_all(1, 0, count) && world->has_all(0, 1, count); }));
    if (streams == 1) CHECK((world->has_all_in_order(1, 0, count) && world->has_all_in_order(0, 1, count)));
    world->check_contract();
  }
}

TEST_CASE_TEMPLATE_DEFINE("transport: everybody talks to everybody over several streams", Kit, transport_mesh) {
  const auto world = Kit::make(4, 3);
  std::mt19937 random(11);
  constexpr std::size_t kCount = 150;
  for (std::size_t i = 0; i < kCount; ++i) {
    for (PeerId from = 0; from < 4; ++from)
      for (PeerId to = 0; to < 4; ++to)
        if (from != to) world->send(from, to, random() % 3 == 0 ? random() % 20000 : random() % 100);
    for (PeerId id = 0; id < 4; ++id) world->step(id);
  }
  const auto all_there = [&] {
    for (PeerId from = 0; from < 4; ++from)
      for (PeerId to = 0; to < 4; ++to)
        if (from != to && !world->has_all(to, from, kCount)) return false;
    return true;
  };
  CHECK(world->run_until(all_there));
  world->check_contract();
}

TEST_CASE_TEMPLATE_DEFINE("transport: peers with much to receive are served alike", Kit, transport_fairness) {
  const auto world = Kit::make(5, 1);
  const std::size_t count = Kit::kBulkBytes / kBlock / 8;
  for (PeerId to = 1; to < 5; ++to)
    for (std::size_t i = 0; i < count; ++i) world->send(0, to, kBlock);
  const auto total = [&] {
    std::size_t sum = 0;
    for (PeerId to = 1; to < 5; ++to) sum += world->sink(to).received(0).size();
    return sum;
  };
  CHECK(world->run_until([&] { return total() >= 2 * count; }));
  for (PeerId to = 1; to < 5; ++to) CHECK(world->sink(to).received(0).size() >= count / 8);
  CHECK(world->run_until([&] { return total() == 4 * count; }));
  world->check_contract();
}

// ---- Who calls whom, and when

TEST_CASE_TEMPLATE_DEFINE("transport: no callback is inline", Kit, transport_not_inline) {
  const auto world = Kit::make(2, 2);
  for (int round = 0; round < 3; ++round) {
    world->sink(0).queue(1, 100);
    // The sinks record a callback that comes from anywhere but World::step.
    world->at(0).notify(1);
    world->at(0).notify(1);
    (void)world->at(0).counters(1);
    (void)world->at(0).silent_ms(1);
    CHECK(world->sink(0).asked(1) == world->sink(0).taken(1) * 2);
    world->run_until_quiet();
  }
  world->at(0).finish();
  CHECK_FALSE(world->at(0).finished());
  CHECK(world->has_all(1, 0, 3));
  world->kill(0);
  world->check_contract();
}

TEST_CASE_TEMPLATE_DEFINE("transport: a sink is asked after notify, until it says no", Kit, transport_parked) {
  const auto world = Kit::make(3, 2);
  world->run_until_quiet();
  CHECK(world->sink(0).asked(1) == 0);
  world->sink(0).queue(1, 10);  // nobody has been told
  world->run_until_quiet();
  CHECK(world->sink(0).asked(1) == 0);
  world->at(0).notify(1);
  world->run_until_quiet();
  CHECK(world->sink(0).asked(1) == 2);  // a frame, and "nothing"
  for (int i = 0; i < 20; ++i) world->step(0);
  CHECK(world->sink(0).asked(1) == 2);
  world->at(0).notify(1);
  world->run_until_quiet();
  CHECK(world->sink(0).asked(1) == 3);
  CHECK(world->sink(0).asked(2) == 0);
  world->check_contract();
}

TEST_CASE_TEMPLATE_DEFINE("transport: answers are queued and notified from within callbacks", Kit,
                          transport_ping_pong) {
  const auto world = Kit::make(2, 1);
  constexpr std::size_t kRounds = 300;
  for (const PeerId id : {0u, 1u}) {
    world->sink(id).hook = [&world, id](TestSink::Callback callback, PeerId peer) {
      if (callback != TestSink::kOnFrame || world->sink(id).received(peer).size() >= kRounds) return;
      world->send(id, peer, 100);
      for (PeerId other = 0; other < 4; ++other) world->at(id).notify(other);
    };
  }
  world->send(0, 1, 100);
  CHECK(world->run_until([&] { return world->sink(0).received(1).size() == kRounds; }));
  CHECK(world->has_all_in_order(0, 1, kRounds));
  world->check_contract();
}

TEST_CASE_TEMPLATE_DEFINE("transport: a notify from within an answer of nothing is not lost", Kit,
                          transport_notify_inside) {
  const auto world = Kit::make(3, 2);
  world->run_until_quiet();
  int asked = 0;
  world->sink(0).hook = [&](TestSink::Callback callback, PeerId peer) {
    if (callback != TestSink::kNextFrame || peer != 2) return;
    if (++asked == 1) world->at(0).notify(2);
    if (asked == 2) world->send(0, 1, 10);
  };
  world->at(0).notify(2);
  CHECK(world->run_until([&] { return world->sink(1).received(0).size() == 1; }));
  CHECK(asked == 2);
  world->check_contract();
}

TEST_CASE_TEMPLATE_DEFINE("transport: a late urgent frame overtakes all that is not taken yet", Kit,
                          transport_overtakes) {
  const auto world = Kit::make(2, 1);
  world->run_until_quiet();
  world->hold(1);
  constexpr std::size_t kCount = 200;
  for (std::size_t i = 0; i < kCount; ++i) world->send(0, 1, kBlock);
  world->run_until_quiet();
  const std::size_t taken = world->sink(0).taken(1);
  CHECK(taken > 0);
  CHECK(taken < kCount / 2);
  const std::uint64_t urgent = world->send(0, 1, 100, /*priority=*/10);
  world->run_until_quiet();
  world->hold(1, false);
  CHECK(world->run_until([&] { return world->sink(1).received(0).size() == kCount + 1; }));
  const auto& order = world->sink(1).received(0);
  const auto place = static_cast<std::size_t>(std::find(order.begin(), order.end(), urgent) - order.begin());
  CHECK(place <= taken + 1);  // + 1: in between, the kernel may have found room for one more
  world->check_contract();
}

TEST_CASE_TEMPLATE_DEFINE("transport: the descriptor says when there is something to do", Kit, transport_descriptor) {
  const auto world = Kit::make(2, 2);
  const int descriptor = world->at(0).descriptor();
  if (descriptor < 0) return;  // one that is only run by hand
  world->run_until_quiet();
  CHECK_FALSE(is_readable(descriptor));
  world->send(0, 1, 10);
  CHECK(is_readable(descriptor));
  world->run_until_quiet();
  CHECK_FALSE(is_readable(descriptor));
  world->send(1, 0, 10);
  CHECK(world->step(1) > 0);
  CHECK(is_readable(descriptor, kPatienceMs));
  world->run_until_quiet();
  CHECK_FALSE(is_readable(descriptor));
  world->at(0).finish();
  CHECK(is_readable(descriptor));
  world->check_contract();
}

TEST_CASE_TEMPLATE_DEFINE("transport: silence is measured for each peer", Kit, transport_silence) {
  const auto world = Kit::make(3, 1);
  world->run_until_quiet();
  world->pass_ms(40);
  CHECK(world->at(0).silent_ms(1) >= 40);
  CHECK(world->at(0).silent_ms(0) == 0);
  world->send(1, 0, 10);
  CHECK(world->run_until([&] { return world->sink(0).received(1).size() == 1; }));
  const std::int64_t of_who_spoke = world->at(0).silent_ms(1);
  CHECK(world->at(0).silent_ms(2) - of_who_spoke >= 39);  // two values, each rounded to milliseconds
  world->check_contract();
}

TEST_CASE_TEMPLATE_DEFINE("transport: unknown peers are ignored", Kit, transport_unknown) {
  const auto world = Kit::make(2, 1);
  for (const PeerId id : {0u, 2u, 4'000'000'000u}) {
    world->at(0).notify(id);
    CHECK(world->at(0).silent_ms(id) == 0);
    CHECK(world->at(0).counters(id).bytes_sent == 0);
  }
  world->run_until_quiet();
  CHECK(world->sink(0).first_asked().empty());
  world->check_contract();
}

// ---- The end, in order

TEST_CASE_TEMPLATE_DEFINE("transport: one side finishes", Kit, transport_finish_one) {
  for (const std::uint32_t streams : {1u, 3u}) {
    const auto world = Kit::make(3, streams);
    constexpr std::size_t kCount = 40;
    for (std::size_t i = 0; i < kCount; ++i) world->send(0, 1, kBlock);
    world->at(0).finish();
    world->at(0).finish();
    CHECK_FALSE(world->at(0).finished());
    CHECK(world->run_until([&] { return world->at(0).finished(); }));
    CHECK(world->has_all(1, 0, kCount));
    for (const PeerId id : {1u, 2u}) {
      CHECK((world->sink(id).closed(0).times == 1 && world->sink(id).closed(0).code == Errc::kOk));
      CHECK((world->sink(0).closed(id).times == 1 && world->sink(0).closed(id).code == Errc::kOk));
    }
    world->at(0).close();
    world->send(1, 2, 10);  // life goes on
    CHECK(world->run_until([&] { return world->sink(2).received(1).size() == 1; }));
    CHECK(world->sink(1).closed(2).times == 0);
    world->check_contract();
  }
}

TEST_CASE_TEMPLATE_DEFINE("transport: both sides finish at once and nothing is lost", Kit, transport_finish_both) {
  for (const std::uint32_t streams : {1u, 3u}) {
    const auto world = Kit::make(2, streams);
    std::mt19937 random(3);
    constexpr std::size_t kCount = 30;
    for (std::size_t i = 0; i < kCount; ++i) world->send(0, 1, random() % 100'000);
    for (std::size_t i = 0; i < 2 * kCount; ++i) world->send(1, 0, random() % 100'000);
    world->at(0).finish();
    world->at(1).finish();
    // Each closes as soon as it may, while the other may be at it still.
    CHECK(world->run_until([&] {
      for (const PeerId id : {0u, 1u})
        if (world->at(id).finished()) world->at(id).close();
      return world->sink(0).closed(1).times + world->sink(1).closed(0).times == 2;
    }));
    CHECK(world->sink(0).closed(1).code == Errc::kOk);
    CHECK(world->sink(1).closed(0).code == Errc::kOk);
    CHECK(world->has_all(1, 0, kCount));
    CHECK(world->has_all(0, 1, 2 * kCount));
    CHECK(world->sink(0).sent(1) == kCount);
    CHECK(world->sink(1).sent(0) == 2 * kCount);
    world->check_contract();
  }
}

TEST_CASE_TEMPLATE_DEFINE("transport: after its BYE a stream takes no frame", Kit, transport_finish_is_final) {
  const auto world = Kit::make(2, 2);
  world->run_until_quiet();
  world->hold(1);
  world->at(0).finish();
  world->run_until_quiet();
  const std::size_t asked = world->sink(0).asked(1);
  CHECK(asked == 2);                     // once for each stream
  CHECK_FALSE(world->at(0).finished());  // the other side has not read it
  world->send(0, 1, 10);
  world->run_until_quiet();
  CHECK(world->sink(0).asked(1) == asked);
  world->hold(1, false);
  CHECK(world->run_until([&] { return world->sink(0).closed(1).times == 1; }));
  CHECK(world->sink(1).received(0).empty());
  CHECK(world->sink(1).closed(0).code == Errc::kOk);
  world->check_contract();
}

TEST_CASE_TEMPLATE_DEFINE("transport: once finishing, the death of a peer is in order", Kit, transport_finish_death) {
  const auto world = Kit::make(2, 2);
  world->run_until_quiet();
  world->at(0).finish();
  world->kill(1);
  CHECK(world->run_until([&] { return world->sink(0).closed(1).times == 1; }));
  CHECK(world->sink(0).closed(1).code == Errc::kOk);
  CHECK(world->at(0).finished());
  world->check_contract();
}

// ---- The end, otherwise

TEST_CASE_TEMPLATE_DEFINE("transport: a peer that dies is lost, once, and the others go on", Kit, transport_death) {
  for (const bool in_the_middle : {false, true}) {
    for (const PeerId victim : {0u, 1u}) {
      const auto world = Kit::make(3, 2);
      world->run_until_quiet();
      if (in_the_middle) {
        for (int i = 0; i < 400; ++i) {
          world->send(0, 1, kBlock);
          world->send(0, 2, 100);
        }
        CHECK(world->run_until([&] { return world->sink(1).received(0).size() >= 3; }));
      }
      world->kill(victim);
      const PeerId survivor = 1 - victim;
      CHECK(world->run_until([&] { return world->sink(survivor).closed(victim).times == 1; }));
      CHECK(world->run_until([&] { return world->sink(2).closed(victim).times == 1; }));
      CHECK(world->sink(survivor).closed(victim).code == Errc::kPeerLost);
      CHECK(world->sink(2).closed(victim).code == Errc::kPeerLost);
      world->send(survivor, victim, 10);
      world->send(survivor, 2, 10);
      const std::size_t count = survivor == 0 && in_the_middle ? 401 : 1;
      CHECK(world->run_until([&] { return world->has_all(2, survivor, count); }));
      CHECK(world->sink(survivor).closed(2).times == 0);
      world->check_contract();
    }
  }
}

TEST_CASE_TEMPLATE_DEFINE("transport: a frame that the sink refuses closes the peer", Kit, transport_refusal) {
  for (const int what : {0, 1, 2, 3}) {
    const auto world = Kit::make(2, 2);
    TestSink& sink = world->sink(1);
    if (what == 0) sink.header_answer = Errc::kMismatch;
    if (what == 1) sink.frame_answer = Errc::kMismatch;
    if (what == 2) sink.gives_no_memory = true;
    if (what == 3) sink.frame_answer = Errc::kMismatch;
    for (int i = 0; i < 5; ++i) world->send(0, 1, what == 3 ? 0 : 100);
    CHECK(world->run_until([&] { return sink.closed(0).times == 1 && world->sink(0).closed(1).times == 1; }));
    CHECK(sink.closed(0).code == Errc::kInternal);
    CHECK(world->sink(0).closed(1).code == Errc::kPeerLost);
    CHECK(sink.received(0).size() <= 1);
    world->run_until_quiet();
    world->check_contract();
  }
}

// Offers one frame that must not go out.
struct BadSink final : FrameSink {
  explicit BadSink(Frame frame) : bad(frame) {}
  Errc on_header(PeerId, const Frame&, std::byte**) noexcept override { return Errc::kInternal; }
  Errc on_frame(PeerId, const Frame&) noexcept override { return Errc::kInternal; }
  bool next_frame(PeerId, OutFrame* out) noexcept override {
    out->frame = bad;
    return ++asked == 1;
  }
  void on_sent(PeerId, const OutFrame&) noexcept override { ++sent; }
  void on_closed(PeerId, Errc code, int) noexcept override {
    ++closed;
    last = code;
  }
  Frame bad;
  int asked = 0, sent = 0, closed = 0;
  Errc last = Errc::kOk;
};

TEST_CASE_TEMPLATE_DEFINE("transport: a malformed frame never leaves", Kit, transport_bad_offer) {
  for (const int what : {0, 1, 2, 3}) {
    Frame frame = made_frame(0, 1, 1, 0);
    if (what == 0) frame.kind = FrameKind::kBye;
    if (what == 1) frame.kind = static_cast<FrameKind>(11);
    if (what == 2) frame.magic ^= 1;
    if (what == 3) frame.payload_bytes = kMaxPayloadBytes + 1;
    const auto world = Kit::make(2, 1);
    BadSink bad(frame);
    world->at(0).attach(&bad);
    world->at(0).notify(1);
    CHECK(world->run_until([&] { return bad.closed == 1 && world->sink(1).closed(0).times == 1; }));
    CHECK(bad.last == Errc::kInternal);
    CHECK(bad.asked == 1);
    CHECK(bad.sent == 0);
    CHECK(world->sink(1).closed(0).code == Errc::kPeerLost);
    CHECK(world->sink(1).received(0).empty());
    world->at(0).close();
    world->check_contract();
  }
}

TEST_CASE_TEMPLATE_DEFINE("transport: after close there is no callback, even when a callback closes", Kit,
                          transport_close_inside) {
  using Callback = TestSink::Callback;
  for (const Callback where :
       {TestSink::kOnHeader, TestSink::kOnFrame, TestSink::kNextFrame, TestSink::kOnSent, TestSink::kOnClosed}) {
    const auto world = Kit::make(3, 2);
    TestSink& sink = world->sink(0);
    sink.hook = [&](Callback callback, PeerId) {
      if (callback != where) return;
      world->at(0).close();
      sink.is_sealed = true;
    };
    for (int i = 0; i < 20; ++i) {
      for (const PeerId peer : {1u, 2u}) {
        world->send(0, peer, 100);
        world->send(peer, 0, 100);
      }
    }
    if (where == TestSink::kOnClosed) {
      world->run_until_quiet();
      world->kill(2);
    }
    CHECK(world->run_until([&] { return sink.is_sealed; }));
    world->at(0).close();
    world->at(0).notify(1);
    world->at(0).finish();
    CHECK(world->step(0) == 0);
    CHECK(world->at(0).descriptor() == -1);
    CHECK(world->run_until([&] { return world->sink(1).closed(0).times == 1; }));
    CHECK(world->sink(1).closed(0).code == Errc::kPeerLost);
    world->check_contract();
  }
}

}  // namespace commlib::test

// clang-format off
#define COMMLIB_TRANSPORT_SUITE(...)                                 \
  TEST_CASE_TEMPLATE_INVOKE(transport_sizes, __VA_ARGS__);           \
  TEST_CASE_TEMPLATE_INVOKE(transport_both_ways, __VA_ARGS__);       \
  TEST_CASE_TEMPLATE_INVOKE(transport_mesh, __VA_ARGS__);            \
  TEST_CASE_TEMPLATE_INVOKE(transport_fairness, __VA_ARGS__);        \
  TEST_CASE_TEMPLATE_INVOKE(transport_not_inline, __VA_ARGS__);      \
  TEST_CASE_TEMPLATE_INVOKE(transport_parked, __VA_ARGS__);          \
  TEST_CASE_TEMPLATE_INVOKE(transport_ping_pong, __VA_ARGS__);       \
  TEST_CASE_TEMPLATE_INVOKE(transport_notify_inside, __VA_ARGS__);   \
  TEST_CASE_TEMPLATE_INVOKE(transport_overtakes, __VA_ARGS__);       \
  TEST_CASE_TEMPLATE_INVOKE(transport_descriptor, __VA_ARGS__);      \
  TEST_CASE_TEMPLATE_INVOKE(transport_silence, __VA_ARGS__);         \
  TEST_CASE_TEMPLATE_INVOKE(transport_unknown, __VA_ARGS__);         \
  TEST_CASE_TEMPLATE_INVOKE(transport_finish_one, __VA_ARGS__);      \
  TEST_CASE_TEMPLATE_INVOKE(transport_finish_both, __VA_ARGS__);     \
  TEST_CASE_TEMPLATE_INVOKE(transport_finish_is_final, __VA_ARGS__); \
  TEST_CASE_TEMPLATE_INVOKE(transport_finish_death, __VA_ARGS__);    \
  TEST_CASE_TEMPLATE_INVOKE(transport_death, __VA_ARGS__);           \
  TEST_CASE_TEMPLATE_INVOKE(transport_refusal, __VA_ARGS__);         \
  TEST_CASE_TEMPLATE_INVOKE(transport_bad_offer, __VA_ARGS__);       \
  TEST_CASE_TEMPLATE_INVOKE(transport_close_inside, __VA_ARGS__)
// clang-format on
