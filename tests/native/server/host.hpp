// SPDX-License-Identifier: Apache-2.0
// A host that keeps to the protocol of server/engine.hpp: says READY or EAGER, pushes what is granted, collects results.
// Its memory is freed as soon as no engine may look at it any more, so that AddressSanitizer watches.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/errc.hpp"
#include "sched/egress.hpp"
#include "sched/placement.hpp"
#include "sched/wire.hpp"
#include "values.hpp"

namespace job {

using commlib::Collective;
using commlib::Egress;
using commlib::Errc;
using commlib::Frame;
using commlib::FrameKind;
using commlib::OutFrame;
using commlib::PeerId;
using commlib::Piece;
using values::Bytes;

inline std::size_t push_item(const Frame& terms) {
  const auto dtype = static_cast<commlib::DType>(terms.dtype);
  if (terms.collective != Collective::kReduce) return commlib::item_bytes(dtype);
  return commlib::item_bytes(commlib::wire_dtype(dtype, static_cast<commlib::ReduceOp>(terms.op)));
}
inline std::size_t result_item(const Frame& terms) {
  return commlib::item_bytes(static_cast<commlib::DType>(terms.dtype));
}

// What one host submits. `terms` has the fields of READY.
struct Submission {
  Frame terms;
  Bytes partial;  // empty where the host contributes nothing
};

struct Outcome {
  Errc code = Errc::kOk;
  std::uint32_t member = 0;
  Bytes result;  // of a broadcast's root: empty
};

// The host side of the protocol.
class Host {
 public:
  Host(PeerId self, const commlib::Placement& placement, Egress& egress, std::uint64_t eager_budget_bytes)
      : self_(self), placement_(placement), egress_(egress), eager_budget_bytes_(eager_budget_bytes) {}

  [[nodiscard]] bool is_busy(std::uint64_t key) const { return parts_.count(key) != 0; }
  [[nodiscard]] std::size_t busy() const { return parts_.size(); }

  // `may_be_eager`: if the budget allows.
  void submit(Submission submission, bool may_be_eager) {
    const std::uint64_t key = submission.terms.key;
    Part& part = parts_[key];
    part.submission = std::make_unique<Submission>(std::move(submission));
    const Frame& terms = part.submission->terms;
    part.contributes = terms.collective == Collective::kReduce ||
                       (terms.collective == Collective::kBroadcast && terms.member == self_);
    cut(placement_, terms.start, terms.count, static_cast<commlib::DType>(terms.dtype), terms.whole == 1, &part.pieces);
    for (const Piece& piece : part.pieces) ++part.owners[piece.owner].left;
    part.result.resize(terms.count * result_item(terms));
    const std::size_t bytes = part.submission->partial.size();
    for (auto& [peer, owner] : part.owners) {
      OutFrame out{terms, nullptr, nullptr};
      out.frame.kind = FrameKind::kReady;
      if (may_be_eager && terms.whole == 1 && eager_bytes_[peer] + bytes <= eager_budget_bytes_) {
        out.frame.kind = FrameKind::kEager;
        out.frame.payload_bytes = static_cast<std::uint32_t>(bytes);
        out.payload = part.submission->partial.data();
        owner.eager_bytes = bytes;
        eager_bytes_[peer] += bytes;
        owner.granted = true;
        if (peer != self_ && bytes != 0) ++part.unsent;
      }
      egress_.push(peer, out, terms.priority);
    }
  }

  Errc on_header(PeerId from, const Frame& frame, std::byte** into) {
    REQUIRE(frame.kind == FrameKind::kResult);
    Part* part = find(frame);
    if (part == nullptr) {
      waste_.resize(512 * 1024);
      *into = waste_.data();
      return Errc::kOk;
    }
    const Piece* piece = piece_at(*part, from, frame);
    REQUIRE(piece != nullptr);
    const std::size_t item = result_item(part->submission->terms);
    REQUIRE(frame.count == piece->count);
    REQUIRE(frame.payload_bytes == piece->count * item);
    *into = part->result.data() + piece->first_element * item;
    ++part->receiving;
    return Errc::kOk;
  }

  void on_frame(PeerId from, const Frame& frame) {
    Part* part = find(frame);
    if (part == nullptr) return;
    const Frame& terms = part->submission->terms;
    Owner& owner = part->owners.at(from);
    if (frame.kind == FrameKind::kGrant) {
      REQUIRE_FALSE(owner.granted);
      owner.granted = true;
      if (!part->code && part->contributes) push_to(*part, from);
    } else if (frame.kind == FrameKind::kFail) {
      REQUIRE_FALSE(owner.failed);
      owner.failed = true;
      settle_eager(from, owner);
      if (!part->code) part->code = {static_cast<Errc>(frame.code), frame.member};
    } else {
      REQUIRE(frame.kind == FrameKind::kResult);
      const Piece* piece = piece_at(*part, from, frame);
      REQUIRE(piece != nullptr);
      const bool is_root = terms.collective == Collective::kBroadcast && part->contributes;
      REQUIRE(frame.payload_bytes == (is_root ? 0 : piece->count * result_item(terms)));
      REQUIRE(frame.count == (is_root ? 0 : piece->count));
      if (frame.payload_bytes != 0) --part->receiving;
      part->answered.push_back(frame.start);
      --owner.left;
      settle_eager(from, owner);
    }
    conclude_if_over(*part);
  }

  void on_sent(const OutFrame& out) {
    if (out.frame.payload_bytes == 0) return;
    Part& part = parts_.at(out.frame.key);
    REQUIRE(part.submission->terms.round == out.frame.round);
    --part.unsent;
    conclude_if_over(part);
  }

  std::map<std::pair<std::uint64_t, std::uint64_t>, Outcome> outcomes;  // by key and round

 private:
  struct Owner {
    bool granted = false;
    bool failed = false;
    std::size_t left = 0;
    std::uint64_t eager_bytes = 0;
  };
  struct Part {
    std::unique_ptr<Submission> submission;
    bool contributes = false;
    std::vector<Piece> pieces;
    std::map<PeerId, Owner> owners;
    Bytes result;
    std::vector<std::uint64_t> answered;
    std::optional<std::pair<Errc, std::uint32_t>> code;
    int unsent = 0;
    int receiving = 0;
  };

  Part* find(const Frame& frame) {
    const auto found = parts_.find(frame.key);
    return found != parts_.end() && found->second.submission->terms.round == frame.round ? &found->second : nullptr;
  }

  static const Piece* piece_at(const Part& part, PeerId from, const Frame& frame) {
    if (std::count(part.answered.begin(), part.answered.end(), frame.start) != 0) return nullptr;
    for (const Piece& piece : part.pieces) {
      if (piece.first_element == frame.start && piece.owner == from) return &piece;
    }
    return nullptr;
  }

  void push_to(Part& part, PeerId peer) {
    const Frame& terms = part.submission->terms;
    const std::size_t item = push_item(terms);
    for (const Piece& piece : part.pieces) {
      if (piece.owner != peer) continue;
      OutFrame out;
      out.frame.kind = FrameKind::kPush;
      out.frame.key = terms.key;
      out.frame.round = terms.round;
      out.frame.start = piece.first_element;
      out.frame.count = piece.count;
      out.frame.payload_bytes = static_cast<std::uint32_t>(piece.count * item);
      out.payload = part.submission->partial.data() + piece.first_element * item;
      if (peer != self_ && out.frame.payload_bytes != 0) ++part.unsent;
      egress_.push(peer, out, terms.priority);
    }
  }

  void settle_eager(PeerId peer, Owner& owner) { eager_bytes_[peer] -= std::exchange(owner.eager_bytes, 0); }

  void conclude_if_over(Part& part) {
    if (part.unsent != 0 || part.receiving != 0) return;
    for (const auto& [peer, owner] : part.owners) {
      if (owner.left != 0 && !owner.failed && (!part.code || owner.granted)) return;
    }
    for (auto& [peer, owner] : part.owners) settle_eager(peer, owner);
    const Frame terms = part.submission->terms;
    Outcome outcome;
    if (part.code) {
      outcome.code = part.code->first;
      outcome.member = part.code->second;
    } else if (terms.collective != Collective::kBroadcast || !part.contributes) {
      outcome.result = std::move(part.result);
    }
    REQUIRE(outcomes.emplace(std::pair{terms.key, terms.round}, std::move(outcome)).second);
    parts_.erase(terms.key);
  }

  PeerId self_;
  const commlib::Placement& placement_;
  Egress& egress_;
  std::uint64_t eager_budget_bytes_;
  std::map<PeerId, std::uint64_t> eager_bytes_;
  std::map<std::uint64_t, Part> parts_;
  Bytes waste_;
};

}  // namespace job
