// SPDX-License-Identifier: Apache-2.0
// What the TCP transport makes of bytes: cut anywhere, malformed, and of all the ways in which a stream can end.
#include <cerrno>
#include <random>

#include "raw_peer.hpp"

namespace commlib::test {

TEST_CASE("tcp: a frame may be cut at every byte") {
  RawPeers world;
  std::uint64_t number = 0;
  for (std::size_t cut = 0; cut <= 3 * sizeof(Frame) + 90; ++cut) {
    Bytes wire;
    for (const std::uint32_t payload_bytes : {60u, 0u, 30u})
      append_frame(&wire, made_frame(1, 0, ++number, payload_bytes));
    const std::span<const std::byte> all(wire);
    world.feed(all.first(cut));
    world.run();
    world.feed(all.subspan(cut));
    world.run();
    REQUIRE(world.sink.received(1).size() == number);
  }
  CHECK(world.sink.received(1).back() == number);
  world.check_contract();
}

TEST_CASE("tcp: sends go on where they were cut, at any byte") {
  std::mt19937 random(5);
  for (const auto connect : {unix_pair, tcp_pair}) {
    RawPeers world(1, 1, connect, 1);
    Bytes wanted;
    constexpr std::uint64_t kCount = 400;
    for (std::uint64_t number = 1; number <= kCount; ++number) {
      const std::uint32_t payload_bytes = random() % 4 == 0 ? random() % 9000 : random() % 200;
      append_frame(&wanted, made_frame(0, 1, number, payload_bytes));
      world.send(payload_bytes);
    }
    Bytes got;
    const bool all_there = world.run_until([&] {
      const Bytes more = world.drain(1, 0, 1 + random() % 3000);
      got.insert(got.end(), more.begin(), more.end());
      return got.size() >= wanted.size();
    });
    CHECK(all_there);
    CHECK(got == wanted);
    CHECK(world.sink.sent(1) == kCount);
    world.check_contract();
  }
}

TEST_CASE("tcp: an end of file at any byte of a frame is a loss, and the frame is not delivered") {
  const Bytes wire = wire_of(made_frame(1, 0, 1, 40));
  for (std::size_t cut = 0; cut < wire.size(); ++cut) {
    RawPeers world;
    world.feed(std::span(wire).first(cut));
    if (cut % 2 == 0) world.run();
    world.raw[0][0].reset();
    world.run();
    CHECK(world.is_closed(1, Errc::kPeerLost, 0));
    CHECK(world.sink.received(1).empty());
    world.check_contract();
  }
}

TEST_CASE("tcp: a malformed header closes the peer and nothing behind it is delivered") {
  const auto spoil = [](int what, Frame* frame) {
    if (what == 0) frame->magic = 0x11C0;
    if (what == 1) frame->kind = static_cast<FrameKind>(0);
    if (what == 2) frame->kind = static_cast<FrameKind>(11);
    if (what == 3) frame->payload_bytes = kMaxPayloadBytes + 1;
    if (what == 4) frame->payload_bytes = 0xFFFFFFFF;
    if (what == 5) *frame = bye_frame(), frame->payload_bytes = 1;
  };
  for (int what = 0; what <= 5; ++what) {
    RawPeers world(2, 2);
    Frame bad = made_frame(1, 0, 2, 0);
    spoil(what, &bad);
    Bytes wire = wire_of(made_frame(1, 0, 1, 100));
    const auto* const header = reinterpret_cast<const std::byte*>(&bad);
    wire.insert(wire.end(), header, header + sizeof bad);
    append_frame(&wire, made_frame(1, 0, 3, 10));
    world.feed(wire);
    world.run();
    CHECK(world.is_closed(1, Errc::kInternal, 0));
    CHECK(world.sink.received(1).size() == 1);
    for (const std::size_t stream : {0u, 1u}) CHECK(::send(world.raw[0][stream].get(), "x", 1, MSG_NOSIGNAL) < 0);
    world.feed_frame(1, 10, 2);  // the other peer has nothing to do with it
    world.run();
    CHECK(world.sink.received(2).size() == 1);
    world.check_contract();
  }
}

TEST_CASE("tcp: nothing may follow BYE on a stream") {
  RawPeers world(1, 2);
  world.feed(wire_of(bye_frame()));
  world.run();
  CHECK(world.sink.closed(1).times == 0);
  SUBCASE("a frame") { world.feed_frame(1, 0); }
  SUBCASE("a single byte") { world.feed(std::array<std::byte, 1>{}); }
  SUBCASE("another BYE") { world.feed(wire_of(bye_frame())); }
  world.run();
  CHECK(world.is_closed(1, Errc::kInternal, 0));
  CHECK(world.sink.received(1).empty());
  world.check_contract();
}

TEST_CASE("tcp: a peer has left when it has said BYE on every stream") {
  RawPeers world(1, 3);
  for (const std::size_t stream : {2u, 0u}) {
    world.feed_frame(stream + 1, 1000, 1, stream);
    world.feed(wire_of(bye_frame()), 1, stream);
    world.raw[0][stream].reset();
    world.run();
    CHECK(world.sink.closed(1).times == 0);
  }
  SUBCASE("in order") {
    world.feed_frame(10, 100'000, 1, 1);
    world.feed(wire_of(bye_frame()), 1, 1);
    world.run();
    CHECK(world.is_closed(1, Errc::kOk, 0));
    CHECK(world.sink.received(1).size() == 3);
    CHECK_FALSE(is_readable(world.transport->descriptor()));
  }
  SUBCASE("or else it is lost") {
    world.feed_frame(10, 1000, 1, 1);
    world.raw[0][1].reset();
    world.run();
    CHECK(world.is_closed(1, Errc::kPeerLost, 0));
    CHECK(world.sink.received(1).size() == 3);
  }
  world.check_contract();
}

TEST_CASE("tcp: a reset is a loss with its errno, unless this side is finishing") {
  for (const bool finishing : {false, true}) {
    RawPeers world(1, 1, tcp_pair);
    const Bytes wire = wire_of(made_frame(1, 0, 1, 500));
    world.feed(std::span(wire).first(300));
    world.run();
    if (finishing) {
      world.transport->finish();
      world.run();
      CHECK(world.drain() == wire_of(bye_frame()));
      CHECK_FALSE(world.transport->finished());
    }
    world.reset();
    CHECK(world.run_until([&] { return world.sink.closed(1).times > 0; }));
    CHECK(world.is_closed(1, finishing ? Errc::kOk : Errc::kPeerLost, finishing ? 0 : ECONNRESET));
    CHECK(world.sink.received(1).empty());
    world.check_contract();
  }
}

TEST_CASE("tcp: a stream that is reset after its BYE does not harm the others") {
  RawPeers world(1, 2, tcp_pair);
  world.send(100);
  world.feed(wire_of(bye_frame()), 1, 0);
  CHECK(world.run_until([&] { return world.sink.sent(1) == 1 && world.step() == 0; }));
  world.reset(1, 0);
  for (int i = 0; i < 50; ++i) world.send(1000);  // some of them into the dead stream
  world.run();
  CHECK(world.sink.closed(1).times == 0);
  world.feed_frame(1, 1000, 1, 1);
  world.feed(wire_of(bye_frame()), 1, 1);
  CHECK(world.run_until([&] { return world.sink.closed(1).times > 0; }));
  CHECK(world.is_closed(1, Errc::kOk, 0));
  CHECK(world.sink.received(1).size() == 1);
  world.check_contract();
}

TEST_CASE("tcp: what came in before the end is delivered, although sending fails already") {
  RawPeers world(1, 1, unix_pair, 2 << 20);
  constexpr std::uint64_t kCount = 20;
  for (std::uint64_t number = 1; number <= kCount; ++number) world.feed_frame(number, 64 * 1024);
  SUBCASE("a loss") {
    world.raw[0][0].reset();
    world.send(10);
    world.run();
    CHECK(world.is_closed(1, Errc::kPeerLost, EPIPE));
  }
  SUBCASE("an orderly end") {
    world.feed(wire_of(bye_frame()));
    world.raw[0][0].reset();
    world.send(10);
    world.run();
    CHECK(world.is_closed(1, Errc::kOk, 0));
  }
  CHECK(world.sink.received(1).size() == kCount);
  CHECK(world.sink.sent(1) == 0);
  world.check_contract();
}

TEST_CASE("tcp: a peer that reads no more is lost as soon as that is seen") {
  RawPeers world;
  world.feed_frame(1, 10);
  REQUIRE(::shutdown(world.raw[0][0].get(), SHUT_RD) == 0);
  world.send(10);
  world.run();
  CHECK(world.is_closed(1, Errc::kPeerLost, EPIPE));
  CHECK(world.sink.received(1).size() == 1);
  world.check_contract();
}

TEST_CASE("tcp: no more than one small batch is taken before its bytes are out") {
  for (const std::uint32_t payload_bytes : {64u * 1024, 8000u, 2000u}) {
    RawPeers world(1, 1, unix_pair, 1);  // a buffer of a few kilobytes
    for (int i = 0; i < 50; ++i) world.send(payload_bytes);
    world.run();
    const std::size_t committed = world.sink.taken(1) - world.sink.sent(1);
    CHECK(committed >= 1);
    CHECK(committed <= 16);
    CHECK((committed - 1) * payload_bytes <= 64 * 1024);
    world.check_contract();
  }
}

TEST_CASE("tcp: finishing, the last frames and BYE still leave after the peer's BYE") {
  RawPeers world(1, 1, unix_pair, 1);
  Bytes wanted;
  for (std::uint64_t number = 1; number <= 20; ++number) {
    append_frame(&wanted, made_frame(0, 1, number, 5000));
    world.send(5000);
  }
  append_frame(&wanted, bye_frame());
  world.transport->finish();
  world.run();
  world.feed(wire_of(bye_frame()));
  world.run();
  CHECK_FALSE(world.transport->finished());
  CHECK(world.sink.closed(1).times == 0);
  Bytes got;
  CHECK(world.run_until([&] {
    const Bytes more = world.drain();
    got.insert(got.end(), more.begin(), more.end());
    return got.size() >= wanted.size();
  }));
  CHECK(got == wanted);
  world.run();
  CHECK(world.transport->finished());
  CHECK(world.is_closed(1, Errc::kOk, 0));
  world.check_contract();
}

TEST_CASE("tcp: streams take turns, and so do peers") {
  RawPeers world(4, 3, unix_pair, 0, {.phase = 3});
  for (PeerId peer = 1; peer <= 4; ++peer) world.send(10, peer);
  world.run();
  CHECK(world.sink.first_asked() == std::vector<PeerId>{3, 4, 1, 2});
  for (int i = 0; i < 5; ++i) {
    world.send(10, 1);
    world.run();
  }
  for (const std::size_t stream : {0u, 1u, 2u}) CHECK(world.drain(1, stream).size() == 2 * (sizeof(Frame) + 10));
  world.check_contract();
}

TEST_CASE("tcp: one do_work is bounded, for each stream and in all") {
  constexpr std::uint32_t kBlock = 64 * 1024;
  SUBCASE("a stream") {
    RawPeers world(1, 1, unix_pair, 2 << 20);
    for (std::uint64_t number = 1; number <= 24; ++number) world.feed_frame(number, kBlock);
    CHECK(world.step() > 0);
    CHECK(world.sink.received(1).size() <= 6);
    world.run();
    CHECK(world.sink.received(1).size() == 24);
  }
  SUBCASE("many streams") {
    constexpr PeerId kPeers = 50;
    RawPeers world(kPeers);
    for (PeerId peer = 1; peer <= kPeers; ++peer)
      for (std::uint64_t number = 1; number <= 2; ++number) world.feed_frame(number, kBlock, peer);
    CHECK(world.step() > 0);
    std::size_t received = 0;
    for (PeerId peer = 1; peer <= kPeers; ++peer) {
      const std::size_t of_peer = world.sink.received(peer).size();
      received += of_peer;
      for (std::uint64_t number = 3; of_peer > 0 && number <= 4; ++number) world.feed_frame(number, kBlock, peer);
    }
    CHECK(received * kBlock <= std::size_t{5} << 20);
    CHECK(world.step() > 0);  // those who had to wait come before those who have more
    for (PeerId peer = 1; peer <= kPeers; ++peer) CHECK(world.sink.received(peer).size() >= 2);
    world.check_contract();
  }
}

}  // namespace commlib::test
