// SPDX-License-Identifier: Apache-2.0
// A host's side of the two hops: announces partitions to their owners, pushes this host's partial where it is granted, and
// receives the result. It lives in the local root; server/engine.hpp is the other side and states the protocol.
//
// The functions of ExchangeDoor, and submit, may be called from any thread; they only leave a message and wake the loop.
// All else belongs to the network loop's thread. It takes frames and emits frames into Egress; it knows no transport.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "base/runner.hpp"
#include "loops/local.hpp"
#include "sched/egress.hpp"
#include "sched/placement.hpp"

namespace commlib {

struct ExchangeOptions {
  PeerId self = 0;
  std::uint32_t hosts = 0;
  std::uint32_t servers = 0;
  std::vector<PeerId> node_of_rank;      // by global rank
  std::uint64_t eager_budget_bytes = 0;  // payload on its way to one owner without a grant
};

class Exchange : public ExchangeDoor {
 public:
  // `loop` is woken when a message has been left; `context` and `egress` outlive the exchange.
  Exchange(ExchangeOptions options, LocalContext& context, Egress& egress, Loop& loop);

  void announce(PartTask& task, bool agree) noexcept override;
  void contribute(PartTask& task) noexcept override;
  void leave(std::uint32_t member) noexcept override;
  // The only rank of its host: input and output are used where they lie. The task is the exchange's from here on.
  void submit(PartTask& task) noexcept;

  // Network loop --------------------------------------------------------------------------------------------------------
  [[nodiscard]] int take_messages();
  // As FrameSink, for the kinds of is_from_owner() and peer ≠ self.
  [[nodiscard]] Errc on_header(PeerId peer, const Frame& frame, std::byte** into) noexcept;
  [[nodiscard]] Errc on_frame(PeerId peer, const Frame& frame) noexcept;
  // The same from the own engine, with the payload where it lies.
  void on_local(const OutFrame& out) noexcept;
  void on_sent(PeerId peer, const OutFrame& out) noexcept;
  // `peer` has left in order (`member` in messages): what it still owes will not come.
  void on_peer_left(PeerId peer, std::uint32_t member) noexcept;
  // The transport is closed: let go of everything.
  void fail_all(Failure failure) noexcept;
  [[nodiscard]] bool is_idle() const noexcept { return parts_.empty() && messages_.is_empty(); }

 private:
  struct Owner {
    PeerId peer;
    bool granted = false;
    bool failed = false;
    std::uint32_t left = 0;  // pieces whose RESULT has not come
    std::uint32_t eager_bytes = 0;
  };
  struct PiecePlan {
    Piece piece;
    std::uint16_t owner;  // index in owners
    bool received = false;
  };
  struct Part {
    PartTask* task = nullptr;
    std::uint64_t key = 0;
    std::uint64_t round = 0;
    bool direct = false;  // no row: the exchange finishes the task itself
    bool contributes = false;
    bool announced = false;
    bool asked = false;                  // the host has been asked for its partial
    const std::byte* partial = nullptr;  // readable once `has_partial`
    bool has_partial = false;
    std::byte* result = nullptr;
    Place partial_place = Place::nowhere();
    Place result_place = Place::nowhere();
    std::uint64_t line = 0;  // of its first byte in the egress
    bool has_line = false;
    std::uint32_t left = 0;       // pieces whose RESULT has not come
    std::uint32_t unsent = 0;     // frames whose payload is our partial, on their way to other nodes
    std::uint32_t receiving = 0;  // payloads of which a part has been received into `result`
    Failure failure;
    std::vector<Owner> owners;
    std::vector<PiecePlan> pieces;
  };
  struct Message {
    enum class Kind : std::uint8_t { kAnnounce, kDisagree, kContribute, kSubmit, kLeave } kind;
    PartTask* task;
    std::uint32_t member = 0;
    std::uint64_t key = 0;  // kContribute: its task may be gone when the message is read
    std::uint64_t round = 0;
  };

  void leave_message(Message message) noexcept;
  void begin(PartTask& task, bool direct, bool agree);
  [[nodiscard]] bool take_memory(Part& part) noexcept;
  void say_ready(Part& part, bool agree);
  void ask_for_partial(Part& part) noexcept;
  void have_partial(Part& part);
  [[nodiscard]] bool try_eager(Part& part);
  void push_to(Part& part, Owner& owner);
  [[nodiscard]] Frame announcement(const Part& part, FrameKind kind, bool agree) const noexcept;
  [[nodiscard]] Part* find(const Frame& frame) noexcept;
  [[nodiscard]] PiecePlan* find_piece(Part& part, PeerId peer, const Frame& frame) noexcept;
  [[nodiscard]] Owner* find_owner(Part& part, PeerId peer) noexcept;
  void received(Part& part, PiecePlan& piece);
  void granted(PeerId peer, const Frame& frame);
  [[nodiscard]] Errc failed(PeerId peer, const Frame& frame);
  void fail(Part& part, Failure failure);
  void settle_eager(Owner& owner) noexcept;
  void conclude_if_over(Part& part);
  void conclude(std::unique_ptr<Part> part) noexcept;

  const ExchangeOptions options_;
  const Placement placement_;
  LocalContext& context_;
  Egress& egress_;
  Loop& loop_;
  Inbox<Message> messages_;
  std::vector<Message> taken_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Part>> parts_;  // by key: a name has one round in flight
  std::vector<std::unique_ptr<Part>> spare_;                        // their vectors keep their capacity
  std::vector<std::uint64_t> eager_bytes_;                          // by owner: on its way without a grant
  std::vector<Failure> gone_;                                       // by peer: why it answers nothing any more
  std::vector<Piece> cut_;
  std::vector<std::byte> waste_;  // where payloads of rounds that are over go
};

}  // namespace commlib
