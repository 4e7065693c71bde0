// SPDX-License-Identifier: Apache-2.0
// One engine on a desk: a test hands it single frames and looks at every frame that comes out.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/log.hpp"
#include "sched/egress.hpp"
#include "sched/wire.hpp"
#include "server/engine.hpp"

namespace desk {

using commlib::Collective;
using commlib::DType;
using commlib::Errc;
using commlib::Frame;
using commlib::FrameKind;
using commlib::OutFrame;
using commlib::PeerId;
using commlib::ReduceOp;

// Without servers, granule g belongs to owner g mod hosts.
constexpr std::uint64_t kGranule = 65536;
constexpr std::uint32_t kPerGranule = kGranule / 4;  // of float32

inline commlib::EngineOptions options_of(std::uint32_t hosts, PeerId self = 0, std::uint64_t budget_bytes = 1 << 24) {
  commlib::EngineOptions options;
  options.self = self;
  options.hosts = hosts;
  options.servers = self >= hosts ? self - hosts + 1 : 0;
  options.ranks_per_host.assign(hosts, 1);
  options.budget_bytes = budget_bytes;
  options.eager_budget_bytes = 128 * 1024;
  options.partition_bytes = 1 << 20;
  return options;
}

// READY of a float32 sum that starts in granule 0.
inline Frame ready(std::uint64_t key, std::uint64_t round, std::uint64_t count, std::int32_t priority = 0) {
  Frame frame;
  frame.kind = FrameKind::kReady;
  frame.key = key << 16;
  frame.round = round;
  frame.hash = 0xABCD;
  frame.count = count;
  frame.dtype = static_cast<std::uint8_t>(DType::kFloat32);
  frame.op = static_cast<std::uint8_t>(ReduceOp::kSum);
  frame.priority = priority;
  frame.whole = count * 4 <= kGranule ? 1 : 0;
  return frame;
}

inline Frame eager(std::uint64_t key, std::uint64_t round, std::uint64_t count) {
  Frame frame = ready(key, round, count);
  frame.kind = FrameKind::kEager;
  frame.payload_bytes = static_cast<std::uint32_t>(count * 4);
  return frame;
}

inline Frame push(std::uint64_t key, std::uint64_t round, std::uint64_t start, std::uint32_t count) {
  Frame frame;
  frame.kind = FrameKind::kPush;
  frame.key = key << 16;
  frame.round = round;
  frame.start = start;
  frame.count = count;
  frame.payload_bytes = count * 4;
  return frame;
}

inline Frame with_hash(Frame frame, std::uint64_t hash) {
  frame.hash = hash;
  return frame;
}

inline Frame broadcast_from(PeerId root, Frame frame) {
  frame.collective = Collective::kBroadcast;
  frame.member = root;
  return frame;
}

inline Frame accumulated_by(PeerId host, Frame frame) {
  frame.collective = Collective::kAccumulate;
  frame.member = host;
  return frame;
}

inline Frame without_payload(Frame frame) {
  frame.payload_bytes = 0;
  return frame;
}

inline Frame barrier(FrameKind kind, std::uint64_t round) {
  Frame frame = ready(1, round, 0);
  frame.kind = kind;
  frame.collective = Collective::kBarrier;
  return frame;
}

class Desk {
 public:
  explicit Desk(const commlib::EngineOptions& options)
      : egress(options.hosts + options.servers),
        log(commlib::LogLevel::kInfo, 1024),
        engine(options, egress, &log),
        peers_(options.hosts + options.servers) {}

  // A remote host sends a frame whose elements are all `value`.
  [[nodiscard]] Errc send(PeerId from, const Frame& frame, float value = 0) {
    std::byte* into = nullptr;
    if (frame.payload_bytes != 0) {
      const Errc result = engine.on_header(from, frame, &into);
      if (result != Errc::kOk) return result;
      for (std::uint32_t at = 0; at + 4 <= frame.payload_bytes; at += 4) std::memcpy(into + at, &value, 4);
    }
    return engine.on_frame(from, frame);
  }

  // The own host does. The elements stay until `forget_local`.
  [[nodiscard]] Errc send_local(const Frame& frame, float value = 0) {
    local_.push_back(std::make_unique<std::vector<float>>(frame.payload_bytes / 4, value));
    return engine.on_local({frame, reinterpret_cast<const std::byte*>(local_.back()->data()), nullptr});
  }
  void forget_local() { local_.clear(); }

  // What waits for `peer`, in order. It counts as on its way until sent().
  [[nodiscard]] std::vector<OutFrame> take(PeerId peer) {
    std::vector<OutFrame> frames;
    OutFrame out;
    while (egress.next(peer, &out)) frames.push_back(out);
    return frames;
  }
  void sent(PeerId peer, const OutFrame& out) {
    egress.sent(peer, out);
    engine.on_sent(peer, out);
  }

  // The kinds of what waits for `peer`, as letters (GRANT, RESULT, FAIL); all of it is sent.
  [[nodiscard]] std::string flush(PeerId peer) {
    std::string kinds;
    for (const OutFrame& out : take(peer)) {
      kinds += letter(out.frame.kind);
      sent(peer, out);
    }
    return kinds;
  }

  // The same for hosts 0 … count−1, one after the other.
  [[nodiscard]] std::string flush_hosts(PeerId count) {
    std::string kinds;
    for (PeerId host = 0; host < count; ++host) kinds += flush(host);
    return kinds;
  }

  [[nodiscard]] static char letter(FrameKind kind) {
    return kind == FrameKind::kGrant ? 'G' : kind == FrameKind::kResult ? 'R' : kind == FrameKind::kFail ? 'F' : '?';
  }

  // Nothing is held, nothing waits.
  [[nodiscard]] bool is_clean() const {
    for (PeerId peer = 0; peer < peers_; ++peer) {
      if (egress.has(peer)) return false;
    }
    return engine.live_shares() == 0 && engine.slot_bytes() == 0 && engine.reserved_bytes() == 0;
  }

  [[nodiscard]] static float element(const OutFrame& out, std::uint64_t index) {
    float value = 0;
    std::memcpy(&value, out.payload + index * 4, 4);
    return value;
  }

  commlib::Egress egress;
  commlib::LogBuffer log;
  commlib::ServerEngine engine;

 private:
  PeerId peers_;
  std::vector<std::unique_ptr<std::vector<float>>> local_;
};

}  // namespace desk
