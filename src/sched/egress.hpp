// SPDX-License-Identifier: Apache-2.0
// The scheduled queue: everything that leaves this process, by peer. Transports take from it at the last moment, so a
// late frame of high priority overtakes all that is not yet on the wire.
//
// Steering frames (READY, GRANT, FAIL, ABORT, …) leave first, in order. Data frames (PUSH, EAGER, RESULT) leave
// by priority, the highest first, and among equals by their *place*: all of them, to whichever peer, stand in one line.
//
// What belongs to a granted partition has places that were reserved for it. Of such frames, those for a peer whose
// connection takes nothing are passed over: where it *holds*, by kMostAheadBytes of the line at most. So the bytes that
// leave are divided among the peers as the bytes that wait are, and nobody's link is idle first and crowded later. Left to
// themselves, connections share a link in equal parts, whatever each of them has to carry.
//
// The own node is a peer like any other, but holds nobody up: what is queued for it is taken by whoever hands frames to
// the host side of this process.
//
// Owned by one loop and used on its thread only. Nothing here blocks. Payloads belong to whoever pushed the frame.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "base/frame.hpp"

namespace commlib {

class Egress {
 public:
  static constexpr std::uint64_t kMostAheadBytes = 1024 * 1024;

  // For peers 0 … peers−1. `holds`: for a job in which some peers are sent more than others; `self` is this node then.
  explicit Egress(std::size_t peers, PeerId self = 0, bool holds = false);

  // `notify(peer)` is called from inside `push` whenever the queue of a peer was empty, and from inside `next` and
  // `discard` when a peer that `next` refused may be asked again. Set it before the first push. It must not call back
  // into this object.
  void set_notify(std::function<void(PeerId)> notify);

  // The next `bytes` of the line: the first of them. For what will be pushed at different times and belongs together.
  [[nodiscard]] std::uint64_t reserve(std::uint64_t bytes) noexcept {
    return std::exchange(line_end_, line_end_ + bytes);
  }

  // O(log n). At the end of the line, or at a reserved place. Nothing is kept for a discarded peer. Throws
  // std::bad_alloc, with nothing changed.
  void push(PeerId peer, const OutFrame& out, std::int32_t priority);
  void push(PeerId peer, const OutFrame& out, std::int32_t priority, std::uint64_t place) {
    push(peer, out, priority, place, true);
  }

  // From now on `next` holds nothing back: its "nothing" is to mean that a queue is empty.
  void stop_holding() noexcept;

  // Takes what should leave to `peer` next; false: nothing now. O(log n + peers).
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
    std::int64_t rank;    // priority; above all priorities for steering frames
    std::uint64_t place;  // order among equals
    std::uint32_t slot;   // index in frames_
    bool is_reserved;     // its place
  };
  struct Peer {
    std::vector<Entry> heap;  // the next to leave on top
    std::uint64_t queued_bytes = 0;
    std::uint64_t in_flight_bytes = 0;
    bool held = false;  // refused by `next`, being too far ahead
    bool gone = false;
  };

  [[nodiscard]] static bool leaves_later(const Entry& a, const Entry& b) noexcept;
  void push(PeerId peer, const OutFrame& out, std::int32_t priority, std::uint64_t place, bool is_reserved);
  [[nodiscard]] bool is_ahead(const Peer& peer) const noexcept;
  void release_held() noexcept;

  std::function<void(PeerId)> notify_;
  const PeerId self_;
  std::vector<Peer> peers_;
  std::vector<OutFrame> frames_;     // the heaps hold indices, which are cheap to move
  std::vector<std::uint32_t> free_;  // unused indices of frames_; its capacity is never below frames_.size()
  std::uint64_t line_end_ = 0;       // in bytes, headers included
  std::size_t held_ = 0;             // peers
  bool holds_;
};

}  // namespace commlib
