// SPDX-License-Identifier: Apache-2.0
// The scheduled queue: everything that leaves this process, by peer. Transports take from it at the last moment, so a
// late frame of high priority overtakes all that is not yet on the wire.
//
// Steering frames (READY, GRANT, FAIL, ABORT, …) leave first, in order. Data frames (PUSH, EAGER, RESULT) leave
// by priority, the highest first, in order among equals. The own node is a peer like any other: what is queued for it
// is taken by whoever hands frames to the host side of this process.
//
// Owned by one loop and used on its thread only. Nothing here blocks. Payloads belong to whoever pushed the frame.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/frame.hpp"

namespace commlib {

class Egress {
 public:
  // For peers 0 … peers−1.
  explicit Egress(std::size_t peers);

  // `notify(peer)` is called from inside `push` whenever the queue of a peer was empty. Set it before the first push.
  // It must not call back into this object.
  void set_notify(std::function<void(PeerId)> notify);

  // O(log n). Nothing is kept for a discarded peer. Throws std::bad_alloc, with nothing changed.
  void push(PeerId peer, const OutFrame& out, std::int32_t priority);

  // Takes what should leave to `peer` next; false: nothing. O(log n).
  [[nodiscard]] bool next(PeerId peer, OutFrame* out) noexcept;
  [[nodiscard]] bool has(PeerId peer) const noexcept { return !peers_[peer].heap.empty(); }

  // A frame that `next` gave out has left this process.
  void sent(PeerId peer, const OutFrame& out) noexcept;

  // The peer is gone for good: drops what is queued and what is in flight for it; later frames to it are dropped too.
  void discard(PeerId peer) noexcept;

  // Bytes, headers included: waiting here, and given out but not yet sent.
  [[nodiscard]] std::uint64_t queued_bytes(PeerId peer) const noexcept { return peers_[peer].queued_bytes; }
  [[nodiscard]] std::uint64_t in_flight_bytes(PeerId peer) const noexcept { return peers_[peer].in_flight_bytes; }

 private:
  struct Entry {
    std::int64_t rank;       // priority; above all priorities for steering frames
    std::uint64_t sequence;  // order among equals
    std::uint32_t slot;      // index in frames_
  };
  struct Peer {
    std::vector<Entry> heap;  // the next to leave on top
    std::uint64_t queued_bytes = 0;
    std::uint64_t in_flight_bytes = 0;
    bool gone = false;
  };

  [[nodiscard]] static bool leaves_later(const Entry& a, const Entry& b) noexcept;

  std::function<void(PeerId)> notify_;
  std::vector<Peer> peers_;
  std::vector<OutFrame> frames_;     // the heaps hold indices, which are cheap to move
  std::vector<std::uint32_t> free_;  // unused indices of frames_; its capacity is never below frames_.size()
  std::uint64_t sequence_ = 0;
};

}  // namespace commlib
