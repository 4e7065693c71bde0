// SPDX-License-Identifier: Apache-2.0
// How frames reach other hosts: the contract every transport keeps. It is written once more, as tests, in
// tests/native/transport/transport_suite.hpp.
//
// A transport belongs to one loop: every function is called on that loop's thread (`close`: see there), and every
// callback comes from inside `do_work`, never from inside `notify` or another call (never inline).
//
// Egress is pulled, not pushed: a transport holds no queue of its own. When a stream can take bytes it asks the sink
// for the next frame to that peer, at the last moment, so that a late frame of high priority overtakes all that is not
// yet on the wire. A stream that answered "nothing" is asked again after `notify(peer)`.
//
// Frames of one stream arrive in order; frames of different streams of one peer in any order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/errc.hpp"
#include "base/frame.hpp"

namespace commlib {

// A frame's payload is never longer than this; a header that says more is malformed. (64 KiB of int8 cross as int64.)
inline constexpr std::uint32_t kMaxPayloadBytes = 8 * 64 * 1024;

// What every transport demands of a header, on its way in and out, before it believes anything else in it.
[[nodiscard]] inline bool is_well_formed(const Frame& frame) noexcept {
  return frame.magic == Frame::kMagic && frame.kind >= FrameKind::kReady && frame.kind <= FrameKind::kLeft &&
         frame.payload_bytes <= (frame.kind == FrameKind::kBye ? 0 : kMaxPayloadBytes);
}

// What has gone to and come from one peer: whole frames of the sinks, headers included in the bytes, BYE not counted.
struct TransportCounters {
  std::uint64_t frames_sent = 0;
  std::uint64_t bytes_sent = 0;
  std::uint64_t frames_received = 0;
  std::uint64_t bytes_received = 0;
};

class FrameSink {
 public:
  virtual ~FrameSink() = default;

  // A header has arrived. Say where its payload goes: `*into` gets frame.payload_bytes writable bytes that stay valid
  // until on_frame or on_closed. Not called when payload_bytes is 0. Anything but kOk closes the peer as malformed.
  [[nodiscard]] virtual Errc on_header(PeerId peer, const Frame& frame, std::byte** into) noexcept = 0;

  // The frame and all of its payload are here. Anything but kOk closes the peer as malformed.
  [[nodiscard]] virtual Errc on_frame(PeerId peer, const Frame& frame) noexcept = 0;

  // Fill `out` with what should go to `peer` next; false: nothing now. BYE is the transport's own: a sink that offers
  // it, or a malformed frame, loses the peer with kInternal.
  [[nodiscard]] virtual bool next_frame(PeerId peer, OutFrame* out) noexcept = 0;

  // All bytes of the frame are out of the caller's memory. Exactly once for each frame taken, unless on_closed comes
  // first.
  virtual void on_sent(PeerId peer, const OutFrame& out) noexcept = 0;

  // The peer is gone: `code` is kOk after an orderly BYE on every stream, kPeerLost (`os_error`: errno, 0 for end of
  // file), or kInternal for a malformed frame. Once for each peer, and the last callback for it. Its streams are closed
  // already; frames taken and not yet reported by on_sent are dropped.
  virtual void on_closed(PeerId peer, Errc code, int os_error) noexcept = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;  // frees; close() first

  // Attach the sink; once, before the first do_work. It must outlive the transport.
  virtual void attach(FrameSink* sink) noexcept = 0;

  // Move what can be moved without blocking, a bounded batch; returns how many frames or pieces of frames moved.
  [[nodiscard]] virtual int do_work() noexcept = 0;

  // There is something for `peer` in the sink. Cheap, may be repeated, unknown or closed peers are ignored.
  virtual void notify(PeerId peer) noexcept = 0;

  // A descriptor that is readable when do_work has something to do; −1 if there is none (loopback).
  [[nodiscard]] virtual int descriptor() const noexcept = 0;

  // Orderly end: each stream whose sink answers "nothing" sends BYE after its last frame and takes no further frame.
  // From now on the end of file (or a reset) from a peer is orderly too. May be repeated. A side that has BYE on every
  // stream of a peer closes that peer with kOk: at once, or if it is finishing itself, after its own last BYE.
  virtual void finish() noexcept = 0;

  // After finish: true when all peers are gone, so each has read everything, BYE included, or will read nothing any
  // more. Who closes earlier, because its patience is over, may destroy what is still on its way: closing a socket with
  // unread data resets it.
  [[nodiscard]] virtual bool finished() const noexcept = 0;

  // Milliseconds since anything was received from `peer`, at first since construction; 0 for an unknown peer.
  [[nodiscard]] virtual std::int64_t silent_ms(PeerId peer) const noexcept = 0;

  // All zero for an unknown peer; they stay readable after on_closed.
  [[nodiscard]] virtual TransportCounters counters(PeerId peer) const noexcept = 0;

  // Refuse new work and close every descriptor. Never blocks, may repeat, no callback afterwards. On the loop's thread
  // (also within a callback), after the loop has stopped, or in the fork handler of a child: async-signal-safe.
  virtual void close() noexcept = 0;
};

}  // namespace commlib
