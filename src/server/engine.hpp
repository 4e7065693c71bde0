// SPDX-License-Identifier: Apache-2.0
// The summation server: what an owner does. One in each host's local root (`self` < hosts) and one in each dedicated
// server. It takes frames and puts frames into an Egress; it knows no transport and no thread.
//
// Per (key, round), a *share*: each host says READY once to every owner of at least one piece of the partition. When
// all have, and agree, slots are reserved and whoever said READY gets GRANT. A PUSH carries exactly one piece. When a
// piece is there from all contributors it is summed in node order and answered to every host in a RESULT.
//   kReduce     all hosts contribute.
//   kBroadcast  host `member` contributes, elements as they are. All others get the pieces. The contributor gets one
//               empty RESULT (count 0) for each piece as soon as its bytes are no longer needed.
//   kBarrier    nobody contributes; count is 0; one empty RESULT to each host.
//   kAccumulate host `member` announces, contributes and is answered, and nobody waits for anybody: what it contributes is
//               added to a total that the owner keeps of the key as long as it lives, and the answer is that total. Rounds
//               are each host's own. A key is used for this alone, or never.
// EAGER (`whole` partitions only) is READY and PUSH in one, gets no GRANT, and may be mixed with READY of other hosts.
// Its payload is empty where the host contributes nothing. Its bytes count against a budget per host from when it is
// sent until the host has a RESULT or FAIL for that key and round.
//
// Every READY and EAGER is answered: by a RESULT for each piece this owner has, or by one FAIL (then perhaps after a
// GRANT and some RESULTs). A host announces the next round of a key only when it is through with this one: all its
// pieces are answered, or some owner has said FAIL. So whatever is incomplete here when it does has failed elsewhere,
// and is failed here too. Such a FAIL may reach a host for which that round is over; all it means then is that EAGER
// bytes are free again. RESULT may overtake GRANT at hosts that contribute nothing; frames of one host may overtake
// each other on the way here.
//
// Payloads of RESULT lie in slots that stay until on_sent. Payloads of the own host are used where they lie; the own
// host keeps them unchanged until the RESULT for that piece, or a FAIL, has been taken for the own node (`self`) and
// on_sent.
#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "base/errc.hpp"
#include "base/frame.hpp"
#include "base/log.hpp"
#include "sched/admission.hpp"
#include "sched/egress.hpp"
#include "sched/placement.hpp"
#include "sched/wire.hpp"
#include "server/share.hpp"
#include "server/share_table.hpp"
#include "server/slot_pool.hpp"

namespace commlib {

struct EngineOptions {
  PeerId self = 0;
  std::uint32_t hosts = 0;  // ≥ 2
  std::uint32_t servers = 0;
  std::vector<std::uint32_t> ranks_per_host;  // `hosts` numbers, each ≥ 1
  std::uint64_t budget_bytes = 0;             // slots of granted shares; less for who owns less than others
  std::uint64_t eager_budget_bytes = 0;       // payload per host; a host that exceeds it is malformed
  std::uint64_t partition_bytes = 0;          // a multiple of 64 KiB
};

// What `credit_bytes` must be at least, so that some shares of a granule can be on their way at once in a job of so many
// hosts.
[[nodiscard]] constexpr std::uint64_t enough_credit(std::uint64_t credit_bytes, std::uint32_t hosts) noexcept {
  const std::uint64_t least = 4 * kGranuleBytes * hosts;
  return credit_bytes < least ? least : credit_bytes;
}

struct EngineCounters {
  std::uint64_t received_bytes = 0;  // payloads of PUSH and EAGER from other nodes
  std::uint64_t sent_bytes = 0;      // payloads of RESULT to other nodes, once sent
  std::uint64_t shares_granted = 0;  // all that all hosts have announced in agreement
  std::uint64_t shares_failed = 0;
  std::uint64_t max_slot_bytes = 0;  // the most memory that slots have held at once
};

class ServerEngine {
 public:
  // `egress` and `log` (may be null) outlive the engine. Throws Error(kConfig).
  ServerEngine(EngineOptions options, Egress& egress, LogBuffer* log);
  ~ServerEngine();
  ServerEngine(const ServerEngine&) = delete;
  ServerEngine& operator=(const ServerEngine&) = delete;

  // As FrameSink, for the kinds of is_for_owner() and `from` ≠ self: where the payload of a PUSH or EAGER goes, and
  // that it (or a frame without payload) is here. kInternal: malformed; kOutOfMemory.
  [[nodiscard]] Errc on_header(PeerId from, const Frame& frame, std::byte** into) noexcept;
  [[nodiscard]] Errc on_frame(PeerId from, const Frame& frame) noexcept;

  // READY, EAGER or PUSH of the own host; `out.context` is not used. kInternal: a bug of the caller; kOutOfMemory.
  [[nodiscard]] Errc on_local(const OutFrame& out) noexcept;

  // A GRANT, RESULT or FAIL that next() gave out for `to` has left (for self: has been copied). Others are ignored.
  void on_sent(PeerId to, const OutFrame& out) noexcept;

  // `peer` has left in order, `member` is its name in FAIL: it announces nothing more. What not all hosts have announced,
  // now and later, fails with kPeerLost at the hosts that have. Its connection may still be open.
  void on_peer_left(PeerId peer, std::uint32_t member) noexcept;

  // Nothing more is received from or sent to `peer`: payload addresses given for it and frames queued for it are void.
  // Unless it has left before, the job is over: what is complete is still answered, every other frame is swallowed, and
  // memory is given back as soon as no frame in flight needs it.
  void on_peer_closed(PeerId peer) noexcept;

  [[nodiscard]] EngineCounters counters() const noexcept;

  // For tests and reports: shares that wait for hosts, for budget, for bytes or for frames to be sent; bytes of budget
  // and of slots in use.
  [[nodiscard]] std::size_t live_shares() const noexcept { return shares_.size(); }
  [[nodiscard]] std::uint64_t reserved_bytes() const noexcept { return admission_.taken_bytes(); }
  [[nodiscard]] std::uint64_t slot_bytes() const noexcept { return pool_.used_bytes(); }

 private:
  // What has been accumulated under a key: the pieces that are this owner's, one after the other.
  struct Total {
    Frame terms;  // of the first announcement; round 0: there was none
    std::vector<std::byte> bytes;
  };
  // A payload on its way in.
  struct Incoming {
    Frame frame;
    Slot slot;
  };
  struct Peer {
    std::vector<Incoming> incoming;  // at most one for each stream
    std::uint64_t eager_bytes = 0;
    std::uint32_t member = 0;
    bool left = false;
    bool closed = false;
  };

  template <typename Body>
  [[nodiscard]] Errc guard(Body&& body) noexcept;
  [[nodiscard]] Errc malformed(PeerId from, const Frame& frame, const char* why) const noexcept;

  // Frames on their way in.
  [[nodiscard]] Errc check_sender(PeerId from, const Frame& frame) const noexcept;
  [[nodiscard]] Errc begin_payload(PeerId from, const Frame& frame, std::byte** into);
  [[nodiscard]] Errc take_payload(PeerId from, const Frame& frame, Slot* slot) noexcept;
  [[nodiscard]] Errc dispatch(PeerId from, const Frame& frame, Contribution contribution);

  // Announcements.
  [[nodiscard]] Errc check_announcement(PeerId from, const Frame& frame) const noexcept;
  [[nodiscard]] Errc announce(PeerId from, const Frame& frame, Contribution contribution);
  void fail_older(const KeyState& state, PeerId from, std::uint64_t round);
  void refuse(PeerId from, const Frame& frame);
  void gathered(Share& share);
  void grant(Share& share);
  void grant_waiting();

  // Pieces.
  [[nodiscard]] Errc find_piece(PeerId from, const Frame& frame, SharePiece** piece) noexcept;
  [[nodiscard]] Contribution& contribution(const SharePiece& piece, PeerId host) const noexcept;
  [[nodiscard]] bool take_total(Share& share);
  void answer(SharePiece& piece);
  [[nodiscard]] const std::byte* combine(SharePiece& piece) noexcept;
  void sent(SharePiece& piece, PeerId to);
  void let_go(SharePiece& piece);

  // Ends.
  void fail(Share& share, Errc code, std::uint32_t member);
  void stop(Share& share) noexcept;
  void retire(Share& share) noexcept;
  void end_job() noexcept;
  [[nodiscard]] bool needs_bytes_of(const Share& share, PeerId host) const noexcept;
  void settle_eager(Share& share, PeerId host) noexcept;
  void send_failure(PeerId to, const Frame& terms, Errc code, std::uint32_t member);

  EngineOptions options_;
  Placement placement_;
  Egress& egress_;
  LogBuffer* log_;
  SlotPool pool_;  // before all that holds slots
  Admission<Share> admission_;
  std::vector<Peer> peers_;
  ShareTable shares_;
  std::unordered_map<std::uint64_t, Total> totals_;  // by key
  std::vector<const void*> sources_;                 // scratch of combine(); one for each host
  std::vector<Piece> cut_;                           // scratch of gathered()
  EngineCounters counters_;
  std::optional<std::uint32_t> leaver_;  // the first host that left, as FAIL names it
  bool over_ = false;                    // the job is
  bool out_of_memory_ = false;           // that is why
};

}  // namespace commlib
