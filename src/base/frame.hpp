// SPDX-License-Identifier: Apache-2.0
// What travels between hosts: a fixed 64-byte header, then `payload_bytes` of raw elements.
// Little-endian as in memory; peers compare a protocol version before the first frame (commlib/control/bootstrap.py).
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace commlib {

enum class FrameKind : std::uint8_t {
  kReady = 1,   // host → owner: all my ranks have submitted this partition
  kEager = 2,   // READY and PUSH in one, for pieces of at most kGranuleBytes
  kGrant = 3,   // owner → host: slots are reserved, push
  kPush = 4,    // host → owner: one piece of this host's contribution
  kResult = 5,  // owner → host: one piece of the result
  kFail = 6,    // owner → host: this round failed (`code`), for everybody
  kAbort = 7,   // anybody → anybody: a member is lost; the job is over
  kBeat = 8,    // "I live"
  kBye = 9,     // nothing follows on this stream; end of file after it is not a failure
  kLeft = 10,   // anybody → everybody: `member`, a rank of mine or another's, has left, and I announce nothing more
};

// Which collective a READY announces. kAccumulate is one only for the ranks of a host; see server/engine.hpp.
enum class Collective : std::uint8_t { kReduce = 0, kBroadcast = 1, kBarrier = 2, kAccumulate = 3 };

// Do the ranks of a host put something in that is added?
[[nodiscard]] constexpr bool is_sum(Collective collective) noexcept {
  return collective == Collective::kReduce || collective == Collective::kAccumulate;
}

struct Frame {
  static constexpr std::uint16_t kMagic = 0xC011;

  std::uint16_t magic = kMagic;
  FrameKind kind{};
  std::uint8_t flags = 0;           // kFlag… of sched/wire.hpp
  std::uint32_t payload_bytes = 0;  // bytes that follow this header
  std::uint64_t key = 0;            // declared_key << 16 | part
  std::uint64_t round = 0;          // 1, 2, …: the how-manieth use of the key
  std::uint64_t hash = 0;           // READY, EAGER: hash of the signature. ABORT: epoch
  std::uint64_t start = 0;          // READY, EAGER: virtual byte address of the partition. PUSH, RESULT: first element
  std::uint64_t count = 0;          // READY, EAGER: elements in the partition. PUSH, RESULT: elements in this frame
  std::uint8_t dtype = 0;           // READY, EAGER: DType
  std::uint8_t op = 0;              // READY, EAGER: ReduceOp
  Collective collective{};          // READY, EAGER, PUSH
  std::uint8_t code = 0;            // FAIL: Errc. ABORT: cause
  std::int32_t priority = 0;        // READY, EAGER
  // Broadcast: node of the root; accumulate: the sender's. ABORT, FAIL, LEFT: who (global rank, or kServerBit | index).
  std::uint32_t member = 0;
  std::uint32_t whole = 0;  // READY, EAGER: 1 if the whole tensor goes to the owner of its first byte
};
static_assert(sizeof(Frame) == 64 && std::is_trivially_copyable_v<Frame>);

using PeerId = std::uint32_t;  // index of a node: hosts 0 … n−1, then dedicated servers n … n+k−1

// A frame on its way out. `payload` must stay readable and unchanged until it is sent or its peer is closed.
struct OutFrame {
  Frame frame;  // frame.payload_bytes bytes at `payload` follow it
  const std::byte* payload = nullptr;
  void* context = nullptr;  // of whoever made the frame; given back when it has been sent
};

}  // namespace commlib
