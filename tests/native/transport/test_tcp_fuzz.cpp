// SPDX-License-Identifier: Apache-2.0
// Damaged byte streams. An independent reading of the same bytes says what must be delivered and how it must end.
#include <random>

#include "raw_peer.hpp"

namespace commlib::test {

namespace {

struct Reading {
  std::vector<Bytes> frames;  // header and payload, as delivered
  bool malformed = false;
  bool said_bye = false;
  bool more_after_bye = false;
};

std::uint32_t number_at(const Bytes& wire, std::size_t at, int bytes) {
  std::uint32_t value = 0;
  for (int i = bytes - 1; i >= 0; --i) value = value << 8 | std::to_integer<std::uint32_t>(wire[at + i]);
  return value;
}

// Written from the text of frame.hpp, byte by byte.
Reading read_wire(const Bytes& wire) {
  Reading reading;
  std::size_t at = 0;
  while (wire.size() - at >= 64) {
    const std::uint32_t magic = number_at(wire, at, 2);
    const std::uint32_t kind = number_at(wire, at + 2, 1);
    const std::uint32_t payload_bytes = number_at(wire, at + 4, 4);
    const std::uint32_t most = kind == 9 ? 0 : 512 * 1024;
    if (magic != 0xC011 || kind < 1 || kind > 10 || payload_bytes > most) {
      reading.malformed = true;
      return reading;
    }
    if (kind == 9) {
      reading.said_bye = true;
      reading.more_after_bye = wire.size() > at + 64;
      return reading;
    }
    if (wire.size() - at - 64 < payload_bytes) return reading;
    const auto from = wire.begin() + static_cast<std::ptrdiff_t>(at);
    reading.frames.emplace_back(from, from + 64 + payload_bytes);
    at += 64 + payload_bytes;
  }
  return reading;
}

// Writes down what it is given.
struct Recorder final : FrameSink {
  Errc on_header(PeerId, const Frame& frame, std::byte** into) noexcept override {
    payload.assign(frame.payload_bytes, std::byte{0});
    *into = payload.data();
    return Errc::kOk;
  }
  Errc on_frame(PeerId, const Frame& frame) noexcept override {
    const auto* const header = reinterpret_cast<const std::byte*>(&frame);
    frames.emplace_back(header, header + sizeof frame);
    if (frame.payload_bytes > 0) frames.back().insert(frames.back().end(), payload.begin(), payload.end());
    return Errc::kOk;
  }
  bool next_frame(PeerId, OutFrame*) noexcept override { return false; }
  void on_sent(PeerId, const OutFrame&) noexcept override {}
  void on_closed(PeerId, Errc code, int) noexcept override {
    ++closed;
    last = code;
  }
  Bytes payload;
  std::vector<Bytes> frames;
  int closed = 0;
  Errc last = Errc::kOk;
};

class Damage {
 public:
  explicit Damage(std::uint32_t seed) : random_(seed) {}

  std::uint32_t below(std::size_t bound) { return static_cast<std::uint32_t>(random_() % bound); }

  Bytes good_wire() {
    Bytes wire;
    const std::uint32_t count = 1 + below(5);
    for (std::uint32_t number = 1; number <= count; ++number)
      append_frame(&wire, made_frame(1, 0, number, below(3) == 0 ? 0 : below(300)));
    if (below(2) == 0) append_frame(&wire, bye_frame());
    return wire;
  }

  void apply(Bytes* wire) {
    switch (below(7)) {
      case 0:  // bits
        for (std::uint32_t i = 1 + below(8); i > 0; --i) (*wire)[below(wire->size())] ^= std::byte(1u << below(8));
        break;
      case 1:  // a bit of the first header, where it matters most
        (*wire)[below(8)] ^= std::byte(1u << below(8));
        break;
      case 2:  // cut short
        wire->resize(below(wire->size()));
        break;
      case 3:  // a size at the border
      {
        const std::uint32_t sizes[] = {kMaxPayloadBytes, kMaxPayloadBytes + 1, 0xFFFFFFFF, 0x80000000, 1, 0};
        std::memcpy(wire->data() + 4, &sizes[below(6)], 4);
        break;
      }
      case 4:  // nothing but noise
        wire->resize(below(500));
        for (std::byte& byte : *wire) byte = static_cast<std::byte>(random_());
        break;
      case 5:  // bytes lost
      {
        const auto from = wire->begin() + below(wire->size());
        wire->erase(from, from + below(static_cast<std::size_t>(wire->end() - from) + 1));
        break;
      }
      default:  // undamaged
        break;
    }
  }

 private:
  std::mt19937 random_;
};

}  // namespace

TEST_CASE("tcp: damaged streams never crash it and it never makes up a frame") {
  std::uint64_t malformed = 0, lost = 0, orderly = 0;
  const std::uint64_t seeds = tried(20'000);
  for (std::uint32_t seed = 1; seed <= seeds; ++seed) {
    CAPTURE(seed);
    Damage damage(seed);
    Bytes wire = damage.good_wire();
    damage.apply(&wire);
    const Reading wanted = read_wire(wire);

    RawPeers world;
    Recorder recorder;
    world.transport->attach(&recorder);
    std::span<const std::byte> rest(wire);
    while (!rest.empty() && recorder.closed == 0) {
      const std::size_t chunk = damage.below(2) == 0 ? rest.size() : 1 + damage.below(rest.size());
      world.feed(rest.first(chunk));
      rest = rest.subspan(chunk);
      world.run();
    }
    world.raw[0][0].reset();
    world.run();

    REQUIRE(recorder.closed == 1);
    REQUIRE(recorder.frames == wanted.frames);
    if (wanted.malformed) {
      REQUIRE(recorder.last == Errc::kInternal);
      ++malformed;
    } else if (!wanted.said_bye) {
      REQUIRE(recorder.last == Errc::kPeerLost);
      ++lost;
    } else if (recorder.last != Errc::kOk) {  // bytes behind BYE are seen if they come with it
      REQUIRE(wanted.more_after_bye);
      REQUIRE(recorder.last == Errc::kInternal);
    } else {
      ++orderly;
    }
  }
  CHECK(malformed > seeds / 10);
  CHECK(lost > seeds / 10);
  CHECK(orderly > seeds / 10);
}

}  // namespace commlib::test
