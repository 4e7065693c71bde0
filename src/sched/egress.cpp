// SPDX-License-Identifier: Apache-2.0
#include "sched/egress.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "sched/wire.hpp"

namespace commlib {

namespace {

constexpr std::int64_t kSteering = std::numeric_limits<std::int64_t>::max();

}  // namespace

Egress::Egress(std::size_t peers, PeerId self, bool holds) : self_(self), peers_(peers), holds_(holds) {}

void Egress::set_notify(std::function<void(PeerId)> notify) { notify_ = std::move(notify); }

bool Egress::leaves_later(const Entry& a, const Entry& b) noexcept {
  return a.rank != b.rank ? a.rank < b.rank : a.place > b.place;
}

void Egress::push(PeerId peer, const OutFrame& out, std::int32_t priority) {
  push(peer, out, priority, reserve(wire_bytes(out.frame)), false);
}

void Egress::push(PeerId peer, const OutFrame& out, std::int32_t priority, std::uint64_t place, bool is_reserved) {
  Peer& to = peers_[peer];
  if (to.gone) return;
  // All that can throw comes first.
  if (to.heap.size() == to.heap.capacity()) to.heap.reserve(std::max<std::size_t>(16, 2 * to.heap.capacity()));
  if (free_.empty()) {
    if (frames_.size() == free_.capacity()) free_.reserve(std::max<std::size_t>(64, 2 * frames_.size()));
    frames_.emplace_back();
    free_.push_back(static_cast<std::uint32_t>(frames_.size() - 1));
  }
  const std::uint32_t slot = free_.back();
  free_.pop_back();
  frames_[slot] = out;
  const bool was_empty = to.heap.empty();
  to.heap.push_back({is_data(out.frame.kind) ? priority : kSteering, place, slot, is_reserved});
  std::push_heap(to.heap.begin(), to.heap.end(), leaves_later);
  to.queued_bytes += wire_bytes(out.frame);
  if (was_empty && notify_) notify_(peer);
  if (to.held) release_held();  // what has come may stand before what was held
}

// Is what this peer would be sent next too far ahead of what others wait for?
bool Egress::is_ahead(const Peer& peer) const noexcept {
  const Entry& mine = peer.heap.front();
  if (!holds_ || !mine.is_reserved) return false;
  const Peer* const own = &peers_[self_];
  if (&peer == own) return false;
  return std::ranges::any_of(peers_, [&](const Peer& other) {
    if (other.heap.empty() || &other == own) return false;
    const Entry& theirs = other.heap.front();
    return theirs.is_reserved && theirs.rank == mine.rank && theirs.place + kMostAheadBytes < mine.place;
  });
}

void Egress::stop_holding() noexcept {
  holds_ = false;
  release_held();
}

void Egress::release_held() noexcept {
  for (PeerId peer = 0; held_ != 0 && peer < peers_.size(); ++peer) {
    if (!peers_[peer].held || (!peers_[peer].heap.empty() && is_ahead(peers_[peer]))) continue;
    peers_[peer].held = false;
    --held_;
    if (notify_) notify_(peer);
  }
}

bool Egress::next(PeerId peer, OutFrame* out) noexcept {
  Peer& to = peers_[peer];
  if (to.heap.empty()) return false;
  if (is_ahead(to)) {
    held_ += to.held ? 0 : 1;
    to.held = true;
    return false;
  }
  std::pop_heap(to.heap.begin(), to.heap.end(), leaves_later);
  const std::uint32_t slot = to.heap.back().slot;
  to.heap.pop_back();
  *out = frames_[slot];
  free_.push_back(slot);  // within its capacity: see push
  to.queued_bytes -= wire_bytes(out->frame);
  to.in_flight_bytes += wire_bytes(out->frame);
  if (held_ != 0) release_held();
  return true;
}

void Egress::sent(PeerId peer, const OutFrame& out) noexcept {
  Peer& to = peers_[peer];
  if (!to.gone) to.in_flight_bytes -= wire_bytes(out.frame);
}

void Egress::discard(PeerId peer) noexcept {
  Peer& to = peers_[peer];
  for (const Entry& entry : to.heap) free_.push_back(entry.slot);
  held_ -= to.held ? 1 : 0;
  to = Peer{};
  to.gone = true;
  release_held();
}

}  // namespace commlib
