// SPDX-License-Identifier: Apache-2.0
// Design notes
//
// A lane carries the frames of one stream in one direction. Its parcels, oldest first, are: delivered ones, which the
// sender has not reported by on_sent yet; then at most one of which the header and half of the payload have been
// delivered (only with a seed); then those that the receiver has not seen. The payloads stay in the sender's memory all
// the while.
//
// A connection ends when one of its sides closes it or dies. The other notices in its next do_work, before it looks at
// what would still be on its way, so no payload is read after its owner let go of it.
#include "transport/loopback.hpp"

#include <algorithm>
#include <cstring>

#include "base/errc.hpp"

namespace commlib {

struct LoopbackHub::Lane {
  struct Parcel {
    OutFrame out;
    std::uint64_t due = 0;      // the do_work of the receiver in which it may go on
    std::byte* into = nullptr;  // where the receiver wants the payload, once it has seen the header
    std::size_t copied = 0;
  };

  std::vector<Parcel> parcels;  // at most `window`
  std::size_t delivered = 0;    // so many of them
  bool bye_taken = false;
  bool bye_received = false;

  [[nodiscard]] bool is_bye_sent() const noexcept { return bye_taken && parcels.empty(); }
};

class LoopbackHub::Endpoint final : public Transport {
 public:
  Endpoint(LoopbackHub& hub, PeerId self, PeerId endpoints) : hub_(hub), self_(self), peers_(endpoints) {
    peers_[self].gone = true;
  }

  void attach(FrameSink* sink) noexcept override { sink_ = sink; }
  [[nodiscard]] int do_work() noexcept override;
  [[nodiscard]] int descriptor() const noexcept override { return -1; }
  [[nodiscard]] bool finished() const noexcept override;
  void close() noexcept override { closed_ = true; }

  void notify(PeerId id) noexcept override {
    if (id < peers_.size() && is_alive(id)) peers_[id].wants = true;
  }

  void finish() noexcept override { finishing_ = finishing_ || !closed_; }

  [[nodiscard]] std::int64_t silent_ms(PeerId id) const noexcept override {
    return id < peers_.size() && id != self_ ? hub_.now_ms_ - peers_[id].received_ms : 0;
  }

  [[nodiscard]] TransportCounters counters(PeerId id) const noexcept override {
    return id < peers_.size() ? peers_[id].counters : TransportCounters{};
  }

  [[nodiscard]] bool is_alive(PeerId id) const noexcept { return !closed_ && !peers_[id].gone; }
  [[nodiscard]] bool wants(PeerId id) const noexcept { return peers_[id].wants; }
  [[nodiscard]] bool is_paused() const noexcept { return paused_; }
  void pause(bool paused) noexcept { paused_ = paused; }

 private:
  struct Peer {
    bool wants = false;
    bool gone = false;
    std::uint32_t first_stream = 0;
    std::int64_t received_ms = 0;
    TransportCounters counters;
  };

  int serve(PeerId id) noexcept;
  int receive(PeerId id, Lane& lane) noexcept;
  [[nodiscard]] Errc deliver(PeerId id, Lane& lane) noexcept;
  int report_sent(PeerId id, Lane& lane) noexcept;
  int take(PeerId id, Lane& lane) noexcept;
  [[nodiscard]] bool is_over(PeerId id) const noexcept;
  [[nodiscard]] bool all_said_bye(PeerId id) const noexcept;
  void close_peer(PeerId id, Errc code) noexcept;

  LoopbackHub& hub_;
  const PeerId self_;
  FrameSink* sink_ = nullptr;
  std::vector<Peer> peers_;
  std::uint64_t turn_ = 0;  // how many do_works there were
  bool finishing_ = false;
  bool closed_ = false;
  bool paused_ = false;
};

int LoopbackHub::Endpoint::do_work() noexcept {
  if (closed_ || paused_ || sink_ == nullptr) return 0;
  ++turn_;
  int moved = 0;
  for (std::size_t i = 1; i < peers_.size() && !closed_; ++i) {
    const auto id = static_cast<PeerId>((self_ + i) % peers_.size());
    if (is_alive(id)) moved += serve(id);
  }
  return moved;
}

int LoopbackHub::Endpoint::serve(PeerId id) noexcept {
  const std::uint32_t streams = hub_.options_.streams;
  if (!hub_.endpoints_[id]->is_alive(self_)) {  // end of file
    for (std::uint32_t i = 0; i < streams && is_alive(id); ++i) report_sent(id, hub_.lane(self_, id, i));
    if (is_alive(id)) close_peer(id, finishing_ || all_said_bye(id) ? Errc::kOk : Errc::kPeerLost);
    return 1;
  }
  const std::uint32_t first = peers_[id].first_stream + hub_.random_below(streams);
  peers_[id].first_stream = (peers_[id].first_stream + 1) % streams;
  int moved = 0;
  for (std::uint32_t i = 0; i < streams && is_alive(id); ++i)
    moved += receive(id, hub_.lane(id, self_, (first + i) % streams));
  for (std::uint32_t i = 0; i < streams && is_alive(id); ++i) {
    Lane& lane = hub_.lane(self_, id, (first + i) % streams);
    moved += report_sent(id, lane);
    if (is_alive(id)) moved += take(id, lane);
  }
  if (is_alive(id) && is_over(id)) close_peer(id, Errc::kOk);
  return moved;
}

int LoopbackHub::Endpoint::receive(PeerId id, Lane& lane) noexcept {
  int moved = 0;
  while (is_alive(id) && lane.delivered < lane.parcels.size() && lane.parcels[lane.delivered].due <= turn_) {
    ++moved;
    peers_[id].received_ms = hub_.now_ms_;
    if (deliver(id, lane) != Errc::kOk && is_alive(id)) close_peer(id, Errc::kInternal);
  }
  return moved;
}

// Brings the oldest parcel that is not delivered one step further.
Errc LoopbackHub::Endpoint::deliver(PeerId id, Lane& lane) noexcept {
  Lane::Parcel& parcel = lane.parcels[lane.delivered];
  const Frame& frame = parcel.out.frame;
  if (frame.kind == FrameKind::kBye) {
    lane.bye_received = true;
    ++lane.delivered;
    return Errc::kOk;
  }
  if (frame.payload_bytes > 0 && parcel.into == nullptr) {
    const Errc code = sink_->on_header(id, frame, &parcel.into);
    if (code != Errc::kOk || closed_) return code;
    if (parcel.into == nullptr) return Errc::kInternal;
    const std::uint32_t delay = hub_.random_below(hub_.options_.max_delay + 1);
    parcel.copied = delay > 0 ? frame.payload_bytes / 2 : 0;
    if (parcel.copied > 0) std::memcpy(parcel.into, parcel.out.payload, parcel.copied);
    parcel.due = turn_ + delay;
    if (delay > 0) return Errc::kOk;
  }
  const std::size_t rest = frame.payload_bytes - parcel.copied;
  if (rest > 0) std::memcpy(parcel.into + parcel.copied, parcel.out.payload + parcel.copied, rest);
  ++lane.delivered;
  ++peers_[id].counters.frames_received;
  peers_[id].counters.bytes_received += sizeof(Frame) + frame.payload_bytes;
  return sink_->on_frame(id, frame);
}

int LoopbackHub::Endpoint::report_sent(PeerId id, Lane& lane) noexcept {
  int moved = 0;
  while (is_alive(id) && lane.delivered > 0) {
    const OutFrame out = lane.parcels.front().out;
    lane.parcels.erase(lane.parcels.begin());
    --lane.delivered;
    ++moved;
    if (out.frame.kind == FrameKind::kBye) continue;
    ++peers_[id].counters.frames_sent;
    peers_[id].counters.bytes_sent += sizeof(Frame) + out.frame.payload_bytes;
    sink_->on_sent(id, out);
  }
  return moved;
}

int LoopbackHub::Endpoint::take(PeerId id, Lane& lane) noexcept {
  Peer& peer = peers_[id];
  int moved = 0;
  while (!lane.bye_taken && lane.parcels.size() < hub_.options_.window && (peer.wants || finishing_)) {
    OutFrame out;
    peer.wants = false;  // before asking: a notify from within the answer counts
    const bool taken = sink_->next_frame(id, &out);
    if (closed_) break;
    if (taken) {
      peer.wants = true;
      if (!is_well_formed(out.frame) || out.frame.kind == FrameKind::kBye) {
        close_peer(id, Errc::kInternal);
        break;
      }
    } else if (finishing_) {
      out = OutFrame{};
      out.frame.kind = FrameKind::kBye;
      lane.bye_taken = true;
    } else {
      break;
    }
    const Endpoint& receiver = *hub_.endpoints_[id];
    Lane::Parcel parcel;
    parcel.out = out;
    parcel.due = receiver.turn_ + hub_.random_below(hub_.options_.max_delay + 1);
    lane.parcels.push_back(parcel);  // within its reserve
    ++moved;
  }
  return moved;
}

bool LoopbackHub::Endpoint::all_said_bye(PeerId id) const noexcept {
  for (std::uint32_t stream = 0; stream < hub_.options_.streams; ++stream)
    if (!hub_.lane(id, self_, stream).bye_received) return false;
  return true;
}

// Nothing can come any more, and, if this side is finishing, nothing is left to say.
bool LoopbackHub::Endpoint::is_over(PeerId id) const noexcept {
  if (!all_said_bye(id)) return false;
  for (std::uint32_t stream = 0; stream < hub_.options_.streams; ++stream)
    if (finishing_ && !hub_.lane(self_, id, stream).is_bye_sent()) return false;
  return true;
}

bool LoopbackHub::Endpoint::finished() const noexcept {
  if (!finishing_) return false;
  for (PeerId id = 0; id < peers_.size(); ++id)
    if (is_alive(id)) return false;
  return true;
}

void LoopbackHub::Endpoint::close_peer(PeerId id, Errc code) noexcept {
  peers_[id].gone = true;  // from now on neither side looks at their lanes
  sink_->on_closed(id, code, 0);
}

LoopbackHub::LoopbackHub(PeerId endpoints, LoopbackOptions options) : options_(options), random_(options.seed) {
  COMMLIB_CHECK(options.streams > 0 && options.window > 0);
  for (PeerId id = 0; id < endpoints; ++id) endpoints_.push_back(std::make_unique<Endpoint>(*this, id, endpoints));
  lanes_.resize(std::size_t{endpoints} * endpoints * options.streams);
  for (auto& lane : lanes_) {
    lane = std::make_unique<Lane>();
    lane->parcels.reserve(options.window);
  }
}

LoopbackHub::~LoopbackHub() = default;

Transport& LoopbackHub::endpoint(PeerId id) noexcept { return *endpoints_[id]; }

void LoopbackHub::pause(PeerId id, bool paused) noexcept { endpoints_[id]->pause(paused); }

LoopbackHub::Lane& LoopbackHub::lane(PeerId from, PeerId to, std::uint32_t stream) const noexcept {
  return *lanes_[(from * endpoints_.size() + to) * options_.streams + stream];
}

std::uint32_t LoopbackHub::random_below(std::uint32_t bound) noexcept {
  return options_.seed == 0 ? 0 : static_cast<std::uint32_t>(random_() % bound);
}

int LoopbackHub::step() noexcept {
  int moved = 0;
  for (auto& endpoint : endpoints_) moved += endpoint->do_work();
  return moved;
}

bool LoopbackHub::is_quiet() const noexcept {
  for (PeerId from = 0; from < endpoints_.size(); ++from) {
    for (PeerId to = 0; to < endpoints_.size(); ++to) {
      const Endpoint& sender = *endpoints_[from];
      const Endpoint& receiver = *endpoints_[to];
      const bool connected = sender.is_alive(to) && receiver.is_alive(from);
      if (!connected || sender.is_paused() || receiver.is_paused()) continue;
      if (sender.wants(to)) return false;
      for (std::uint32_t stream = 0; stream < options_.streams; ++stream)
        if (!lane(from, to, stream).parcels.empty()) return false;
    }
  }
  return true;
}

bool LoopbackHub::run_until_quiet(const std::function<int()>& others, int max_steps) {
  for (int i = 0; i < max_steps; ++i) {
    int moved = step();
    if (others) moved += others();
    if (moved == 0 && is_quiet()) return true;
  }
  return false;
}

}  // namespace commlib
