// SPDX-License-Identifier: Apache-2.0
//
// Design notes
//
// A share lives through gathering → (waiting) → collecting → draining. While it is one of the first three it is found
// by key and round. In the last one only frames on their way out refer to it; each RESULT carries its piece as
// `context`. A share that fails goes to draining from wherever it is, or ends at once when no frame refers to it.
//
// Payloads on their way in belong to the peer they come from, not to a share, so a share may end while they arrive.
//
// Rounds that failed elsewhere. Hosts that disagree about a shape may announce a partition to different owners; the
// owner of its first byte hears them all and fails the round, the others never hear them all. A host's next round of
// that key tells them. What is left of a key that is never used again is one share without payload: EAGER goes only to
// that first owner.
//
// Frames of one host travel on several streams. So the announcement of a round may come after that of a later one, and
// is refused; a PUSH may come after the share has failed, and is swallowed.
#include "server/engine.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "reduce/reduce.hpp"
#include "sched/partition.hpp"
#include "sched/wire.hpp"

namespace commlib {

namespace {

EngineOptions checked(EngineOptions options) {
  if (options.hosts < 2) throw Error(Errc::kConfig, "an engine needs at least two hosts");
  if (options.self >= options.hosts + options.servers) throw Error(Errc::kConfig, "no such node");
  const auto& ranks = options.ranks_per_host;
  if (ranks.size() != options.hosts || std::count(ranks.begin(), ranks.end(), 0U) != 0) {
    throw Error(Errc::kConfig, "every host needs at least one rank");
  }
  check_partition_bytes(options.partition_bytes);
  return options;
}

bool is_contributor_of_broadcast(const Frame& terms, PeerId host) noexcept {
  return terms.collective == Collective::kBroadcast && terms.member == host;
}

// A frame about the same key and round.
Frame frame_about(FrameKind kind, const Frame& terms) noexcept {
  Frame frame;
  frame.kind = kind;
  frame.key = terms.key;
  frame.round = terms.round;
  return frame;
}

}  // namespace

ServerEngine::ServerEngine(EngineOptions options, Egress& egress, LogBuffer* log)
    : options_(checked(std::move(options))),
      placement_(options_.hosts, options_.servers),
      egress_(egress),
      log_(log),
      pool_(options_.budget_bytes + options_.hosts * options_.eager_budget_bytes),
      admission_(placement_.in_proportion(options_.self, options_.budget_bytes)),
      peers_(options_.hosts + options_.servers),
      shares_(options_.hosts),
      sources_(options_.hosts) {}

ServerEngine::~ServerEngine() = default;

EngineCounters ServerEngine::counters() const noexcept {
  EngineCounters counters = counters_;
  counters.max_slot_bytes = pool_.max_used_bytes();
  return counters;
}

// Runs the body of a public function. Without memory the engine can keep no promise: the job is over.
template <typename Body>
Errc ServerEngine::guard(Body&& body) noexcept {
  Errc result = Errc::kOutOfMemory;
  try {
    result = body();
  } catch (const std::bad_alloc&) {
    COMMLIB_LOG(log_, LogLevel::kError, "node %u: no memory left for the server engine", options_.self);
  }
  if (result == Errc::kOutOfMemory && !out_of_memory_) {
    out_of_memory_ = true;
    end_job();
  }
  return result;
}

Errc ServerEngine::malformed(PeerId from, const Frame& frame, const char* why) const noexcept {
  COMMLIB_LOG(log_, LogLevel::kError, "node %u sent a malformed frame (kind %d, key %llu, round %llu) to node %u: %s",
              from, static_cast<int>(frame.kind), static_cast<unsigned long long>(frame.key),
              static_cast<unsigned long long>(frame.round), options_.self, why);
  return Errc::kInternal;
}

// --- Frames on their way in --------------------------------------------------------------------------------------

Errc ServerEngine::on_header(PeerId from, const Frame& frame, std::byte** into) noexcept {
  return guard([&] {
    const Errc result = check_sender(from, frame);
    return result != Errc::kOk ? result : begin_payload(from, frame, into);
  });
}

Errc ServerEngine::on_frame(PeerId from, const Frame& frame) noexcept {
  return guard([&] {
    Errc result = check_sender(from, frame);
    Contribution arrived;
    if (result == Errc::kOk) result = take_payload(from, frame, &arrived.slot);
    if (result != Errc::kOk || over_) return result;
    counters_.received_bytes += frame.payload_bytes;
    arrived.data = arrived.slot.data();
    return dispatch(from, frame, std::move(arrived));
  });
}

Errc ServerEngine::on_local(const OutFrame& out) noexcept {
  return guard([&] {
    if (over_) return out_of_memory_ ? Errc::kOutOfMemory : Errc::kOk;
    if (options_.self >= options_.hosts) return malformed(options_.self, out.frame, "this node is not a host");
    if (out.payload == nullptr && out.frame.payload_bytes != 0)
      return malformed(options_.self, out.frame, "no payload");
    Contribution here;
    here.data = out.payload;
    return dispatch(options_.self, out.frame, std::move(here));
  });
}

Errc ServerEngine::check_sender(PeerId from, const Frame& frame) const noexcept {
  if (out_of_memory_) return Errc::kOutOfMemory;
  if (from >= options_.hosts || from == options_.self) return malformed(from, frame, "not from another host");
  if (peers_[from].closed) return malformed(from, frame, "its connection is closed");
  return Errc::kOk;
}

Errc ServerEngine::begin_payload(PeerId from, const Frame& frame, std::byte** into) {
  Peer& peer = peers_[from];
  if (frame.payload_bytes == 0 || frame.payload_bytes > SlotPool::kMaxBytes) {
    return malformed(from, frame, "impossible payload size");
  }
  if (!over_ && frame.kind == FrameKind::kPush) {
    SharePiece* piece = nullptr;
    const Errc found = find_piece(from, frame, &piece);
    if (found != Errc::kOk && found != Errc::kAgain) return found;
  } else if (!over_) {
    const Errc checked = check_announcement(from, frame);
    if (checked != Errc::kOk) return checked;
    if (frame.payload_bytes > options_.eager_budget_bytes - peer.eager_bytes) {
      return malformed(from, frame, "its eager budget is exceeded");
    }
  }
  Slot slot = pool_.take(frame.payload_bytes);
  if (!slot) return Errc::kOutOfMemory;
  *into = slot.data();
  peer.incoming.push_back({frame, std::move(slot)});
  if (frame.kind == FrameKind::kEager) peer.eager_bytes += frame.payload_bytes;
  return Errc::kOk;
}

Errc ServerEngine::take_payload(PeerId from, const Frame& frame, Slot* slot) noexcept {
  if (frame.payload_bytes == 0) return Errc::kOk;
  auto& incoming = peers_[from].incoming;
  for (Incoming& candidate : incoming) {
    if (std::memcmp(&candidate.frame, &frame, sizeof(Frame)) != 0) continue;
    *slot = std::move(candidate.slot);
    if (&candidate != &incoming.back()) candidate = std::move(incoming.back());
    incoming.pop_back();
    return Errc::kOk;
  }
  return malformed(from, frame, "a payload without its header");
}

Errc ServerEngine::dispatch(PeerId from, const Frame& frame, Contribution arrived) {
  Errc result = Errc::kOk;
  if (frame.kind == FrameKind::kPush) {
    SharePiece* piece = nullptr;
    result = find_piece(from, frame, &piece);
    if (result == Errc::kAgain) return Errc::kOk;
    if (result != Errc::kOk) return result;
    arrived.arrived = true;
    contribution(*piece, from) = std::move(arrived);
    if (--piece->missing == 0) answer(*piece);
  } else {
    result = check_announcement(from, frame);
    if (result == Errc::kOk) result = announce(from, frame, std::move(arrived));
  }
  grant_waiting();
  return result;
}

// --- Announcements -----------------------------------------------------------------------------------------------

Errc ServerEngine::check_announcement(PeerId from, const Frame& frame) const noexcept {
  if (frame.kind != FrameKind::kReady && frame.kind != FrameKind::kEager) {
    return malformed(from, frame, "not for the owner");
  }
  const char* fault = fault_of_announcement(frame, options_.hosts, options_.partition_bytes);
  if (fault != nullptr) return malformed(from, frame, fault);
  const std::uint64_t expected = frame.kind == FrameKind::kEager ? eager_bytes(frame, from) : 0;
  const bool nothing_to_say = (frame.flags & kFlagDisagree) != 0 && frame.payload_bytes == 0;
  if (frame.payload_bytes != expected && !nothing_to_say) return malformed(from, frame, "wrong payload size");
  if (frame.collective == Collective::kAccumulate && frame.member != from) return malformed(from, frame, "another's");
  if (!owns_a_piece(placement_, options_.self, frame)) return malformed(from, frame, "none of it belongs here");
  return Errc::kOk;
}

Errc ServerEngine::announce(PeerId from, const Frame& frame, Contribution arrived) {
  const bool is_collective = frame.collective != Collective::kAccumulate;
  KeyState& state = shares_.key_state(frame.key, frame.collective, from);
  Share* share = state.find(frame.round);
  if ((share != nullptr && share->hosts[from].announced != Announced::kNothing) ||
      (share == nullptr && frame.round == state.heard_round)) {
    return malformed(from, frame, "announced twice");
  }
  fail_older(state, from, frame.round);
  if (share == nullptr) {
    if (state.is_over(frame.round) || (is_collective && (leaver_.has_value() || totals_.contains(frame.key)))) {
      refuse(from, frame);
      return Errc::kOk;
    }
    share = &shares_.make(state, frame);
  }
  share->disagree |= (frame.flags & kFlagDisagree) != 0 || !is_same_operation(share->terms, frame);
  share->priority = std::max(share->priority, frame.priority);
  ShareHost& host = share->hosts[from];
  host.announced = Announced::kReady;
  if (frame.kind == FrameKind::kEager) {
    host.announced = Announced::kEager;
    host.eager_bytes = from == options_.self ? 0 : frame.payload_bytes;
    arrived.arrived = true;
    share->contributions[from] = std::move(arrived);
  }
  if (++share->announced == announcers(frame, options_.hosts)) gathered(*share);
  return Errc::kOk;
}

// A host announces a round: it is through with all older ones. What is not complete here has failed elsewhere.
void ServerEngine::fail_older(const KeyState& state, PeerId from, std::uint64_t round) {
  for (std::size_t i = state.shares.size(); i-- > 0;) {
    Share& share = *state.shares[i];
    if (share.terms.round >= round) continue;
    // A root may count a broadcast as done when its pushes have left, and this may have overtaken them.
    if (share.phase == SharePhase::kCollecting && is_contributor_of_broadcast(share.terms, from)) continue;
    fail(share, leaver_ ? Errc::kPeerLost : Errc::kMismatch, leaver_.value_or(0));
  }
}

// The round has failed already, or cannot be completed.
void ServerEngine::refuse(PeerId from, const Frame& frame) {
  if (frame.kind == FrameKind::kEager && from != options_.self) peers_[from].eager_bytes -= frame.payload_bytes;
  send_failure(from, frame, leaver_ ? Errc::kPeerLost : Errc::kMismatch, leaver_.value_or(0));
}

void ServerEngine::gathered(Share& share) {
  share.key_state->heard_round = std::max(share.key_state->heard_round, share.terms.round);
  if (share.disagree) return fail(share, Errc::kMismatch, 0);

  const Frame& terms = share.terms;
  cut(placement_, terms.start, terms.count, static_cast<DType>(terms.dtype), terms.whole == 1, &cut_);
  std::uint64_t elements = 0;
  for (const Piece& piece : cut_) {
    if (piece.owner != options_.self) continue;
    SharePiece& mine = share.pieces.emplace_back();
    mine.share = &share;
    mine.first_element = piece.first_element;
    mine.count = piece.count;
    elements += piece.count;
  }
  if (terms.collective == Collective::kAccumulate && !take_total(share)) return fail(share, Errc::kMismatch, 0);
  share.contributions.resize(share.pieces.size() * options_.hosts);
  share.open_pieces = static_cast<std::uint32_t>(share.pieces.size());
  for (PeerId host = 0; host < options_.hosts; ++host) {
    if (!contributes(terms, host) || share.hosts[host].announced == Announced::kEager) continue;
    for (SharePiece& piece : share.pieces) ++piece.missing;
    if (host != options_.self) share.reserved_bytes += elements * push_item_bytes(terms);
  }
  if (share.reserved_bytes == 0) return grant(share);
  share.phase = SharePhase::kWaiting;
  admission_.add(&share, share.reserved_bytes, share.priority);
}

void ServerEngine::grant(Share& share) {
  share.phase = SharePhase::kCollecting;
  ++counters_.shares_granted;
  if (share.reserved_bytes != 0) share.line = egress_.reserve(share.terms.count * result_item_bytes(share.terms));
  for (PeerId host = 0; host < options_.hosts; ++host) {
    if (share.hosts[host].announced != Announced::kReady || peers_[host].closed) continue;
    egress_.push(host, {frame_about(FrameKind::kGrant, share.terms), nullptr, nullptr}, share.priority);
  }
  // The last answer may end the share, which then has no pieces.
  for (std::size_t i = 0; i < share.pieces.size(); ++i) {
    if (share.pieces[i].missing == 0) answer(share.pieces[i]);
  }
}

void ServerEngine::grant_waiting() {
  while (Share* share = admission_.admit()) grant(*share);
}

// --- Pieces ------------------------------------------------------------------------------------------------------

Contribution& ServerEngine::contribution(const SharePiece& piece, PeerId host) const noexcept {
  const auto index = static_cast<std::size_t>(&piece - piece.share->pieces.data());
  return piece.share->contributions[index * options_.hosts + host];
}

// The piece that a PUSH belongs to. kAgain: its round has failed here, the host did not know yet.
Errc ServerEngine::find_piece(PeerId from, const Frame& frame, SharePiece** piece) noexcept {
  const KeyState* state = shares_.find_key(frame.key, frame.collective, from);
  if (state == nullptr) return malformed(from, frame, "unknown key");
  Share* share = state->find(frame.round);
  if (share == nullptr || share->phase != SharePhase::kCollecting) {
    if (share == nullptr && frame.round != 0 && frame.round <= state->failed_round) return Errc::kAgain;
    return malformed(from, frame, "not granted");
  }
  if (!contributes(share->terms, from) || share->hosts[from].announced != Announced::kReady) {
    return malformed(from, frame, "nothing is expected from this host");
  }
  const auto found = std::lower_bound(
      share->pieces.begin(), share->pieces.end(), frame.start,
      [](const SharePiece& candidate, std::uint64_t first) { return candidate.first_element < first; });
  if (found == share->pieces.end() || found->first_element != frame.start || found->count != frame.count ||
      found->count * push_item_bytes(share->terms) != frame.payload_bytes) {
    return malformed(from, frame, "not a piece of this owner");
  }
  if (contribution(*found, from).arrived) return malformed(from, frame, "this piece has come before");
  *piece = &*found;
  return Errc::kOk;
}

// Where the pieces of a share are added up. False if the key stands for something else.
bool ServerEngine::take_total(Share& share) {
  const Frame& terms = share.terms;
  const KeyState* others = shares_.find_key(terms.key, Collective::kReduce, terms.member);
  if (others != nullptr && (others->heard_round != 0 || !others->shares.empty())) return false;
  Total& total = totals_[terms.key];
  if (total.terms.round == 0) {
    total.terms = terms;
    std::uint64_t elements = 0;
    for (const SharePiece& piece : share.pieces) elements += piece.count;
    total.bytes.resize(elements * result_item_bytes(terms));
  }
  std::byte* at = total.bytes.data();
  for (SharePiece& piece : share.pieces) {
    piece.total = at;
    at += piece.count * result_item_bytes(terms);
  }
  return is_same_operation(total.terms, terms);
}

// All contributions are there.
void ServerEngine::answer(SharePiece& piece) {
  Share& share = *piece.share;
  OutFrame out{frame_about(FrameKind::kResult, share.terms), combine(piece), &piece};
  out.frame.start = piece.first_element;
  out.frame.count = piece.count;
  out.frame.payload_bytes = static_cast<std::uint32_t>(piece.count * result_item_bytes(share.terms));
  if (--share.open_pieces == 0) ShareTable::hide(share);
  for (PeerId host = 0; host < options_.hosts; ++host) {
    if (!is_answered(share.terms, host)) continue;
    settle_eager(share, host);
    if (peers_[host].closed) continue;
    if (share.reserved_bytes == 0) {
      egress_.push(host, out, share.priority);
    } else {
      egress_.push(host, out, share.priority, share.line + piece.first_element * result_item_bytes(share.terms));
    }
    contribution(piece, host).unsent = true;
    ++piece.unsent;
    ++share.unsent;
  }
  if (piece.unsent == 0) let_go(piece);
}

// Computes the result and moves it, or what it was computed into, to piece.result. All other slots are free again.
const std::byte* ServerEngine::combine(SharePiece& piece) noexcept {
  const Frame& terms = piece.share->terms;
  if (piece.count == 0) return nullptr;
  if (terms.collective == Collective::kBroadcast) {
    Contribution& root = contribution(piece, terms.member);
    piece.result = std::move(root.slot);
    return root.data;
  }
  if (terms.collective == Collective::kAccumulate) {
    Contribution& source = contribution(piece, terms.member);
    const void* const both[] = {piece.total, source.data};
    const auto dtype = static_cast<DType>(terms.dtype);
    reduce_local(dtype, ReduceOp::kSum, piece.total, both, 2, piece.count);
    // The own host takes it where it lies, with what others may have added by then; nobody minds. What travels is copied:
    // a stream might carry half an element of now and half of later.
    if (!source.slot) return piece.total;
    std::memcpy(source.slot.data(), piece.total, piece.count * result_item_bytes(terms));
    piece.result = std::move(source.slot);
    return piece.result.data();
  }
  for (PeerId host = 0; host < options_.hosts; ++host) {
    Contribution& source = contribution(piece, host);
    sources_[host] = source.data;
    if (!piece.result) piece.result = std::move(source.slot);  // with two hosts at least one is not this one
  }
  reduce_owner(static_cast<DType>(terms.dtype), static_cast<ReduceOp>(terms.op), piece.result.data(), sources_.data(),
               options_.ranks_per_host.data(), options_.hosts, piece.count);
  for (PeerId host = 0; host < options_.hosts; ++host) contribution(piece, host).slot.reset();
  return piece.result.data();
}

void ServerEngine::on_sent(PeerId to, const OutFrame& out) noexcept {
  if (out.frame.kind != FrameKind::kResult || out.context == nullptr || peers_[to].closed) return;
  if (to != options_.self) counters_.sent_bytes += out.frame.payload_bytes;
  (void)guard([&] {
    sent(*static_cast<SharePiece*>(out.context), to);
    grant_waiting();
    return Errc::kOk;
  });
}

void ServerEngine::sent(SharePiece& piece, PeerId to) {
  contribution(piece, to).unsent = false;
  --piece.share->unsent;
  if (--piece.unsent == 0) let_go(piece);
}

// No frame refers to the result of this piece any more.
void ServerEngine::let_go(SharePiece& piece) {
  Share& share = *piece.share;
  piece.result.reset();
  const PeerId root = share.terms.member;
  if (share.terms.collective == Collective::kBroadcast && !share.failed) {
    settle_eager(share, root);
    Frame done = frame_about(FrameKind::kResult, share.terms);
    done.start = piece.first_element;
    if (!peers_[root].closed) egress_.push(root, {done, nullptr, nullptr}, share.priority);
  }
  if (share.open_pieces != 0 || share.unsent != 0) return;
  if (share.fail_contributor_late) send_failure(root, share.terms, share.fail_code, share.fail_member);
  retire(share);
}

// --- Ends --------------------------------------------------------------------------------------------------------

void ServerEngine::fail(Share& share, Errc code, std::uint32_t member) {
  ++counters_.shares_failed;
  if (share.phase == SharePhase::kCollecting) {
    share.key_state->failed_round = std::max(share.key_state->failed_round, share.terms.round);
  }
  stop(share);
  share.fail_code = code;
  share.fail_member = member;
  for (PeerId host = 0; host < options_.hosts; ++host) {
    if (share.hosts[host].announced == Announced::kNothing) continue;
    settle_eager(share, host);
    if (share.unsent != 0 && is_contributor_of_broadcast(share.terms, host)) {
      share.fail_contributor_late = true;
    } else {
      send_failure(host, share.terms, code, member);
    }
  }
  if (share.unsent == 0) retire(share);
}

// From now on only frames on their way out hold anything of this share.
void ServerEngine::stop(Share& share) noexcept {
  if (share.phase == SharePhase::kWaiting) {
    admission_.remove(&share);
    share.reserved_bytes = 0;
  }
  ShareTable::hide(share);
  share.failed = true;
  share.open_pieces = 0;
  for (Contribution& source : share.contributions) source.slot.reset();
}

void ServerEngine::retire(Share& share) noexcept {
  admission_.release(share.reserved_bytes);
  shares_.retire(share);
}

void ServerEngine::end_job() noexcept {
  over_ = true;
  for (std::size_t i = shares_.size(); i-- > 0;) {
    Share& share = shares_.at(i);
    if (share.phase == SharePhase::kDraining) continue;  // complete: whoever is still there gets its answer
    stop(share);
    if (share.unsent == 0) retire(share);
  }
}

void ServerEngine::on_peer_left(PeerId peer, std::uint32_t member) noexcept {
  if (peer >= peers_.size() || peers_[peer].left) return;
  peers_[peer].left = true;
  peers_[peer].member = member;
  if (over_ || peer >= options_.hosts) return;
  if (!leaver_) leaver_ = member;
  (void)guard([&] {
    for (std::size_t i = shares_.size(); i-- > 0;) {
      Share& share = shares_.at(i);
      // Also what it has announced, if others have not: it leaves without waiting for that, and by the time they have, some
      // hosts may have given the operation up. What is gathered now is completed.
      if (share.phase == SharePhase::kGathering) fail(share, Errc::kPeerLost, member);
    }
    grant_waiting();
    return Errc::kOk;
  });
}

void ServerEngine::on_peer_closed(PeerId peer) noexcept {
  if (peer >= peers_.size() || peers_[peer].closed) return;
  peers_[peer].closed = true;
  peers_[peer].incoming.clear();
  if (!peers_[peer].left) end_job();
  if (peer >= options_.hosts) return;
  (void)guard([&] {
    for (std::size_t i = shares_.size(); i-- > 0;) {
      Share& share = shares_.at(i);
      if (needs_bytes_of(share, peer)) fail(share, Errc::kPeerLost, peers_[peer].member);
    }
    for (std::size_t i = shares_.size(); i-- > 0;) {
      Share& share = shares_.at(i);
      for (std::size_t k = 0; k < share.pieces.size(); ++k) {  // none are left once the share has ended
        if (contribution(share.pieces[k], peer).unsent) sent(share.pieces[k], peer);
      }
    }
    grant_waiting();
    return Errc::kOk;
  });
}

// Whether the share cannot be completed without a further frame of a host that has announced it.
bool ServerEngine::needs_bytes_of(const Share& share, PeerId host) const noexcept {
  if (share.phase == SharePhase::kDraining || !contributes(share.terms, host)) return false;
  if (share.hosts[host].announced != Announced::kReady) return false;
  if (share.pieces.empty()) return true;  // still gathering
  return std::any_of(share.pieces.begin(), share.pieces.end(),
                     [&](const SharePiece& piece) { return !contribution(piece, host).arrived; });
}

void ServerEngine::settle_eager(Share& share, PeerId host) noexcept {
  peers_[host].eager_bytes -= std::exchange(share.hosts[host].eager_bytes, 0);
}

void ServerEngine::send_failure(PeerId to, const Frame& terms, Errc code, std::uint32_t member) {
  if (peers_[to].closed) return;
  Frame frame = frame_about(FrameKind::kFail, terms);
  frame.code = static_cast<std::uint8_t>(code);
  frame.member = member;
  egress_.push(to, {frame, nullptr, nullptr}, terms.priority);
}

}  // namespace commlib
