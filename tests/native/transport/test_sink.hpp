// SPDX-License-Identifier: Apache-2.0
// A sink that knows what it must be told. Every header and payload is a function of (sender, receiver, number, size),
// so the receiver can compute what should have arrived. What breaks the contract is collected in `violations`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "transport/transport.hpp"

namespace commlib::test {

inline std::uint64_t scramble(std::uint64_t x) noexcept {  // splitmix64's finaliser
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// The header that `from` sends to `to` as its `number`-th frame.
inline Frame made_frame(PeerId from, PeerId to, std::uint64_t number, std::uint32_t payload_bytes,
                        std::int32_t priority = 0) {
  const std::uint64_t seed = scramble(number + (std::uint64_t{from} << 40) + (std::uint64_t{to} << 50));
  Frame frame;
  constexpr FrameKind kKinds[] = {FrameKind::kReady, FrameKind::kPush, FrameKind::kBeat, FrameKind::kLeft};
  frame.kind = kKinds[seed % std::size(kKinds)];
  frame.flags = static_cast<std::uint8_t>(seed >> 8);
  frame.payload_bytes = payload_bytes;
  frame.key = scramble(seed);
  frame.round = number;
  frame.hash = seed;
  frame.start = ~seed;
  frame.count = seed * 3;
  frame.dtype = static_cast<std::uint8_t>(seed >> 16);
  frame.priority = priority;
  frame.member = static_cast<std::uint32_t>(seed >> 32);
  return frame;
}

inline void fill_payload(std::byte* at, std::size_t bytes, std::uint64_t seed) {
  std::size_t i = 0;
  for (; i + 8 <= bytes; i += 8) {
    const std::uint64_t word = seed + i * 0x9E3779B97F4A7C15u;
    std::memcpy(at + i, &word, 8);
  }
  for (; i < bytes; ++i) at[i] = static_cast<std::byte>(seed + i);
}

class TestSink final : public FrameSink {
 public:
  enum Callback { kOnHeader, kOnFrame, kNextFrame, kOnSent, kOnClosed };

  struct Closed {
    int times = 0;
    Errc code = Errc::kOk;
    int os_error = 0;
  };

  explicit TestSink(PeerId self) : self_(self) {}
  TestSink(const TestSink&) = delete;
  TestSink& operator=(const TestSink&) = delete;

  // Puts a frame where next_frame finds it: behind those of the same or higher priority. Returns its number.
  std::uint64_t queue(PeerId to, std::uint32_t payload_bytes, std::int32_t priority = 0) {
    const std::uint64_t number = ++numbers_[to];
    auto out = std::make_unique<Outgoing>();
    out->frame = made_frame(self_, to, number, payload_bytes, priority);
    out->payload.reset(new std::byte[payload_bytes]);
    fill_payload(out->payload.get(), payload_bytes, out->frame.hash);
    auto& waiting = waiting_[to];
    auto place = waiting.end();
    while (place != waiting.begin() && (*std::prev(place))->frame.priority < priority) --place;
    waiting.insert(place, std::move(out));
    return number;
  }

  // --- what has happened

  [[nodiscard]] const std::vector<std::uint64_t>& received(PeerId from) { return received_[from]; }
  [[nodiscard]] std::size_t taken(PeerId to) { return taken_[to]; }
  [[nodiscard]] std::size_t sent(PeerId to) { return sent_[to]; }
  [[nodiscard]] std::size_t asked(PeerId to) { return asked_[to]; }
  [[nodiscard]] const Closed& closed(PeerId peer) { return closed_[peer]; }
  [[nodiscard]] const std::vector<PeerId>& first_asked() const { return first_asked_; }

  std::vector<std::string> violations;
  bool may_call = false;   // callbacks are expected now
  bool is_sealed = false;  // no callback is expected ever again

  // --- what it should do
  std::function<void(Callback, PeerId)> hook;  // runs within every callback
  Errc header_answer = Errc::kOk;
  Errc frame_answer = Errc::kOk;
  bool gives_no_memory = false;

  // --- FrameSink
  Errc on_header(PeerId peer, const Frame& frame, std::byte** into) noexcept override {
    const Visit visit(*this, kOnHeader, peer);
    expect(frame.payload_bytes > 0, "on_header without payload");
    expect(is_expected(peer, frame), "on_header with a wrong frame");
    auto& landing = landing_[{peer, frame.round}];
    expect(landing == nullptr, "on_header twice");
    landing.reset(new std::byte[frame.payload_bytes]);
    *into = gives_no_memory ? nullptr : landing.get();
    return header_answer;
  }

  Errc on_frame(PeerId peer, const Frame& frame) noexcept override {
    const Visit visit(*this, kOnFrame, peer);
    expect(is_expected(peer, frame), "on_frame with a wrong frame");
    if (frame.payload_bytes > 0) {
      const auto landing = landing_.find({peer, frame.round});
      expect(landing != landing_.end(), "on_frame without on_header");
      std::vector<std::byte> wanted(frame.payload_bytes);
      fill_payload(wanted.data(), wanted.size(), frame.hash);
      expect(landing != landing_.end() && std::memcmp(landing->second.get(), wanted.data(), wanted.size()) == 0,
             "a wrong payload");
      if (landing != landing_.end()) landing_.erase(landing);
    }
    received_[peer].push_back(frame.round);
    return frame_answer;
  }

  bool next_frame(PeerId peer, OutFrame* out) noexcept override {
    const Visit visit(*this, kNextFrame, peer);
    if (asked_[peer]++ == 0) first_asked_.push_back(peer);
    auto& waiting = waiting_[peer];
    if (waiting.empty()) return false;
    std::unique_ptr<Outgoing> next = std::move(waiting.front());
    waiting.pop_front();
    *out = {next->frame, next->payload.get(), next.get()};
    ++taken_[peer];
    in_flight_[peer][next.get()] = std::move(next);
    return true;
  }

  // The payload is overwritten and freed at once: whoever still reads it sends garbage, and AddressSanitizer sees it.
  void on_sent(PeerId peer, const OutFrame& out) noexcept override {
    const Visit visit(*this, kOnSent, peer);
    const auto found = in_flight_[peer].find(out.context);
    expect(found != in_flight_[peer].end(), "on_sent for a frame that is not in flight");
    if (found == in_flight_[peer].end()) return;
    expect(std::memcmp(&out.frame, &found->second->frame, sizeof(Frame)) == 0, "on_sent with another frame");
    std::memset(found->second->payload.get(), 0xEE, out.frame.payload_bytes);
    in_flight_[peer].erase(found);
    ++sent_[peer];
  }

  void on_closed(PeerId peer, Errc code, int os_error) noexcept override {
    const Visit visit(*this, kOnClosed, peer);
    closed_[peer] = {closed_[peer].times + 1, code, os_error};
    in_flight_.erase(peer);  // frees what was not reported: nobody may read it any more
    for (auto it = landing_.begin(); it != landing_.end();)
      it = it->first.first == peer ? landing_.erase(it) : std::next(it);
  }

 private:
  struct Outgoing {
    Frame frame;
    std::unique_ptr<std::byte[]> payload;
  };

  // One callback: where it comes from must be right, and none comes within another.
  struct Visit {
    Visit(TestSink& s, Callback callback, PeerId peer) : sink(s) {
      sink.expect(sink.may_call, "a callback from outside do_work");
      sink.expect(!sink.is_sealed, "a callback after close");
      sink.expect(sink.depth_++ == 0, "a callback within a callback");
      sink.expect(sink.closed_[peer].times == 0, "a callback for a closed peer");
      if (sink.hook) sink.hook(callback, peer);
    }
    ~Visit() { --sink.depth_; }
    TestSink& sink;
  };

  void expect(bool holds, const char* otherwise) {
    if (!holds) violations.emplace_back(otherwise);
  }

  [[nodiscard]] bool is_expected(PeerId peer, const Frame& frame) const {
    const Frame wanted = made_frame(peer, self_, frame.round, frame.payload_bytes, frame.priority);
    return std::memcmp(&wanted, &frame, sizeof frame) == 0;
  }

  const PeerId self_;
  int depth_ = 0;
  std::map<PeerId, std::uint64_t> numbers_;
  std::map<PeerId, std::deque<std::unique_ptr<Outgoing>>> waiting_;
  std::map<PeerId, std::map<void*, std::unique_ptr<Outgoing>>> in_flight_;
  std::map<std::pair<PeerId, std::uint64_t>, std::unique_ptr<std::byte[]>> landing_;
  std::map<PeerId, std::vector<std::uint64_t>> received_;
  std::map<PeerId, std::size_t> taken_, sent_, asked_;
  std::map<PeerId, Closed> closed_;
  std::vector<PeerId> first_asked_;
};

}  // namespace commlib::test
