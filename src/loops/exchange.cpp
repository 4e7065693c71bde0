// SPDX-License-Identifier: Apache-2.0
//
// Design notes
//
// A part lives here from its announcement until every piece of its result is here (then it is concluded as a success) or
// until it has failed and nothing refers to its memory any more: no frame of ours with a payload in it is unsent, no
// payload is half received, and the owners are through with it. When somebody has left, every owner answers, and until then
// gets what it has granted, because other hosts wait for it. When the ranks disagree, an owner that has not been told so by
// all hosts does not answer; it holds nothing of ours.
//
// A round fails as a whole. Owners other than the one that said FAIL may never hear of it from all hosts; they forget it
// when the next round of the key is announced, and answer then. `find` ignores what is said of rounds that are over.
#include "loops/exchange.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "reduce/reduce.hpp"
#include "sched/wire.hpp"
#include "transport/transport.hpp"

namespace commlib {

Exchange::Exchange(ExchangeOptions options, LocalContext& context, Egress& egress, Loop& loop)
    : options_(std::move(options)),
      placement_(options_.hosts, options_.servers),
      context_(context),
      egress_(egress),
      loop_(loop),
      eager_bytes_(options_.hosts + options_.servers),
      gone_(options_.hosts + options_.servers),
      waste_(kMaxPayloadBytes) {}

void Exchange::leave_message(Message message) noexcept {
  if (messages_.push(message)) loop_.wake();
}

void Exchange::announce(PartTask& task, bool agree) noexcept {
  leave_message({agree ? Message::Kind::kAnnounce : Message::Kind::kDisagree, &task});
}
void Exchange::contribute(PartTask& task) noexcept {
  leave_message({Message::Kind::kContribute, nullptr, 0, task.key(), task.operation->round});
}
void Exchange::leave(std::uint32_t member) noexcept { leave_message({Message::Kind::kLeave, nullptr, member}); }
void Exchange::submit(PartTask& task) noexcept { leave_message({Message::Kind::kSubmit, &task}); }

int Exchange::take_messages() {
  messages_.drain(&taken_);
  for (const Message& message : taken_) {
    switch (message.kind) {
      case Message::Kind::kAnnounce:
        begin(*message.task, false, true);
        break;
      case Message::Kind::kDisagree:
        begin(*message.task, false, false);
        break;
      case Message::Kind::kSubmit:
        begin(*message.task, true, true);
        break;
      case Message::Kind::kContribute: {
        // A part that has failed may be gone, and its task with it, or be another round's.
        const auto found = parts_.find(message.key);
        if (found != parts_.end() && found->second->round == message.round) have_partial(*found->second);
        break;
      }
      case Message::Kind::kLeave:
        for (PeerId peer = 0; peer < options_.hosts + options_.servers; ++peer) {
          Frame frame;
          frame.kind = FrameKind::kLeft;
          frame.member = message.member;
          egress_.push(peer, {frame, nullptr, nullptr}, 0);
        }
        break;
    }
  }
  return static_cast<int>(taken_.size());
}

void Exchange::begin(PartTask& task, bool direct, bool agree) {
  std::unique_ptr<Part> fresh;
  if (spare_.empty()) {
    fresh = std::make_unique<Part>();
  } else {
    fresh = std::move(spare_.back());
    spare_.pop_back();
  }
  Part& part = *fresh;
  const Operation& operation = *task.operation;
  part.task = &task;
  part.key = task.key();
  part.round = operation.round;
  part.direct = direct;
  part.contributes = context_.contributes(operation);
  const std::size_t item = item_bytes(operation.dtype);
  cut(placement_, operation.key->cursor + task.first * item, task.count, operation.dtype,
      operation.bytes() <= kGranuleBytes, &cut_);
  for (const Piece& piece : cut_) {
    Owner* owner = find_owner(part, piece.owner);
    if (owner == nullptr) owner = &part.owners.emplace_back(Owner{.peer = piece.owner});
    ++owner->left;
    part.pieces.push_back({piece, static_cast<std::uint16_t>(owner - part.owners.data()), false});
  }
  part.left = static_cast<std::uint32_t>(part.pieces.size());
  COMMLIB_CHECK(parts_.emplace(part.key, std::move(fresh)).second);

  const std::uint64_t word = operation.first_failure.load(std::memory_order_acquire);
  for (const Owner& owner : part.owners) {
    if (gone_[owner.peer].code != Errc::kOk) part.failure = gone_[owner.peer];
  }
  if (word != 0) part.failure = {static_cast<Errc>(word >> 32), static_cast<std::uint32_t>(word)};
  if (part.failure.code != Errc::kOk) return conclude_if_over(part);
  if (!take_memory(part)) return;
  if (!agree) return say_ready(part, false);
  if (part.owners.size() == 1 && operation.bytes() <= kGranuleBytes) {
    if (part.contributes && !part.has_partial)
      return ask_for_partial(part);  // say something when there is something to say
    if (try_eager(part)) return;
  }
  say_ready(part, true);
}

// Memory for what arrives before anything has been granted. Only a granted part takes memory for its partial, but a small
// one is granted by its own host.
bool Exchange::take_memory(Part& part) noexcept {
  if (part.direct) {
    part.partial = part.task->input();
    part.result = part.task->output();
    part.has_partial = true;
    return true;
  }
  if (part.contributes) return true;
  const std::uint64_t offset = context_.arena.allocate(part.task->bytes());
  if (offset == Arena::kNoSpace) {
    context_.table.abort(context_.global_ranks[context_.local_rank], Cause::kMemory);
    return false;
  }
  part.result_place = Place::in_arena(context_.local_rank, offset);
  part.result = context_.arena.at(offset);
  return true;
}

Frame Exchange::announcement(const Part& part, FrameKind kind, bool agree) const noexcept {
  const Operation& operation = *part.task->operation;
  Frame frame;
  frame.kind = kind;
  frame.flags = agree ? 0 : kFlagDisagree;
  frame.key = part.key;
  frame.round = part.round;
  frame.hash = operation.hash;
  frame.start = operation.key->cursor + part.task->first * item_bytes(operation.dtype);
  frame.count = part.task->count;
  frame.dtype = static_cast<std::uint8_t>(operation.dtype);
  frame.op = static_cast<std::uint8_t>(operation.op);
  frame.collective = operation.collective;
  frame.priority = operation.priority;
  if (operation.collective == Collective::kBroadcast) frame.member = options_.node_of_rank[operation.root];
  if (operation.collective == Collective::kAccumulate) frame.member = options_.self;
  frame.whole = operation.bytes() <= kGranuleBytes ? 1 : 0;
  return frame;
}

void Exchange::say_ready(Part& part, bool agree) {
  part.announced = true;
  const Frame frame = announcement(part, FrameKind::kReady, agree);
  for (const Owner& owner : part.owners) egress_.push(owner.peer, {frame, nullptr, nullptr}, 0);
}

void Exchange::ask_for_partial(Part& part) noexcept {
  if (part.asked) return;
  part.asked = true;
  const Operation& operation = *part.task->operation;
  const std::size_t wire = part.task->count * item_bytes(wire_dtype(operation.dtype, operation.op));
  const std::uint64_t partial = context_.arena.allocate(wire);
  // A result narrower than the partial cannot lie in the same memory: its pieces would overwrite what is not yet sent.
  const bool apart = wire != part.task->bytes();
  const std::uint64_t result = !apart ? partial : context_.arena.allocate(part.task->bytes());
  if (partial == Arena::kNoSpace || result == Arena::kNoSpace) {
    context_.table.abort(context_.global_ranks[context_.local_rank], Cause::kMemory);
    return;
  }
  part.partial_place = Place::in_arena(context_.local_rank, partial);
  part.result_place = Place::in_arena(context_.local_rank, result);
  part.partial = context_.arena.at(partial);
  part.result = context_.arena.at(result);
  RowHead& head = part.task->row.head();
  head.partial.store(part.partial_place.bits(), std::memory_order_release);
  head.granted.store(part.round, std::memory_order_release);
  context_.table.announce_all(part.task->row_index);
}

void Exchange::have_partial(Part& part) {
  part.has_partial = true;
  if (!part.announced) {
    if (part.failure.code != Errc::kOk) return conclude_if_over(part);
    if (!try_eager(part)) say_ready(part, true);
    return;
  }
  for (Owner& owner : part.owners) {
    if (owner.granted) push_to(part, owner);
  }
  if (part.failure.code != Errc::kOk) conclude_if_over(part);
}

bool Exchange::try_eager(Part& part) {
  Owner& owner = part.owners.front();
  const Operation& operation = *part.task->operation;
  const std::size_t bytes =
      part.contributes ? part.task->count * item_bytes(wire_dtype(operation.dtype, operation.op)) : 0;
  if (eager_bytes_[owner.peer] + bytes > options_.eager_budget_bytes) return false;
  part.announced = true;
  owner.granted = true;  // in effect: it holds our bytes and will answer
  owner.eager_bytes = static_cast<std::uint32_t>(bytes);
  eager_bytes_[owner.peer] += bytes;
  OutFrame out;
  out.frame = announcement(part, FrameKind::kEager, true);
  out.frame.payload_bytes = static_cast<std::uint32_t>(bytes);
  out.payload = part.partial;
  out.context = &part;
  if (owner.peer != options_.self && bytes != 0) ++part.unsent;
  egress_.push(owner.peer, out, operation.priority);
  return true;
}

void Exchange::push_to(Part& part, Owner& owner) {
  if (!part.contributes) return;
  const Operation& operation = *part.task->operation;
  const std::size_t item = item_bytes(wire_dtype(operation.dtype, operation.op));
  const auto index = static_cast<std::uint16_t>(&owner - part.owners.data());
  // Owners grant at different times; the pieces stand in line in the order of the tensor all the same, in which owners take
  // turns by their shares.
  if (!std::exchange(part.has_line, true)) part.line = egress_.reserve(part.task->count * item);
  for (const PiecePlan& plan : part.pieces) {
    if (plan.owner != index) continue;
    OutFrame out;
    out.frame.kind = FrameKind::kPush;
    out.frame.collective = operation.collective;
    out.frame.key = part.key;
    out.frame.round = part.round;
    out.frame.start = plan.piece.first_element;
    out.frame.count = plan.piece.count;
    out.frame.payload_bytes = static_cast<std::uint32_t>(plan.piece.count * item);
    out.payload = part.partial + plan.piece.first_element * item;
    out.context = &part;
    if (owner.peer != options_.self) ++part.unsent;
    egress_.push(owner.peer, out, operation.priority, part.line + plan.piece.first_element * item);
  }
}

Exchange::Part* Exchange::find(const Frame& frame) noexcept {
  const auto found = parts_.find(frame.key);
  return found != parts_.end() && found->second->round == frame.round ? found->second.get() : nullptr;
}

Exchange::Owner* Exchange::find_owner(Part& part, PeerId peer) noexcept {
  const auto found = std::ranges::find(part.owners, peer, &Owner::peer);
  return found != part.owners.end() ? &*found : nullptr;
}

Exchange::PiecePlan* Exchange::find_piece(Part& part, PeerId peer, const Frame& frame) noexcept {
  const auto first = [](const PiecePlan& plan) { return plan.piece.first_element; };
  const auto found = std::ranges::lower_bound(part.pieces, frame.start, {}, first);
  if (found == part.pieces.end() || found->piece.first_element != frame.start || found->piece.owner != peer)
    return nullptr;
  return found->received ? nullptr : &*found;
}

Errc Exchange::on_header(PeerId peer, const Frame& frame, std::byte** into) noexcept {
  if (frame.kind != FrameKind::kResult) return Errc::kInternal;  // GRANT and FAIL carry nothing
  Part* part = find(frame);
  if (part == nullptr) {
    *into = waste_.data();  // the round is over here; the transport has checked payload_bytes
    return Errc::kOk;
  }
  const PiecePlan* plan = find_piece(*part, peer, frame);
  const std::size_t item = item_bytes(part->task->operation->dtype);
  if (plan == nullptr || frame.count != plan->piece.count || frame.payload_bytes != frame.count * item ||
      part->result == nullptr) {
    return Errc::kInternal;
  }
  *into = part->result + plan->piece.first_element * item;
  ++part->receiving;
  return Errc::kOk;
}

Errc Exchange::on_frame(PeerId peer, const Frame& frame) noexcept {
  switch (frame.kind) {
    case FrameKind::kGrant:
      granted(peer, frame);
      return Errc::kOk;
    case FrameKind::kFail:
      return failed(peer, frame);
    case FrameKind::kResult:
      break;
    default:
      return Errc::kInternal;
  }
  Part* part = find(frame);
  if (part == nullptr) return Errc::kOk;
  PiecePlan* plan = find_piece(*part, peer, frame);
  if (plan == nullptr) return Errc::kInternal;
  if (frame.payload_bytes != 0) {
    --part->receiving;
  } else if (frame.count != 0 ||
             (plan->piece.count != 0 &&
              (part->task->operation->collective != Collective::kBroadcast || !part->contributes))) {
    return Errc::kInternal;  // only the contributor of a broadcast is answered with nothing
  }
  received(*part, *plan);
  return Errc::kOk;
}

void Exchange::on_local(const OutFrame& out) noexcept {
  const Frame& frame = out.frame;
  if (frame.kind == FrameKind::kResult && frame.payload_bytes != 0) {
    Part* part = find(frame);
    if (part == nullptr) return;
    std::memcpy(part->result + frame.start * item_bytes(part->task->operation->dtype), out.payload,
                frame.payload_bytes);
    ++part->receiving;  // on_frame takes it back
  }
  (void)on_frame(options_.self, frame);
}

void Exchange::received(Part& part, PiecePlan& piece) {
  piece.received = true;
  Owner& owner = part.owners[piece.owner];
  --owner.left;
  --part.left;
  if (owner.eager_bytes != 0) settle_eager(owner);
  conclude_if_over(part);
}

void Exchange::settle_eager(Owner& owner) noexcept {
  eager_bytes_[owner.peer] -= owner.eager_bytes;
  owner.eager_bytes = 0;
}

void Exchange::granted(PeerId peer, const Frame& frame) {
  Part* part = find(frame);
  Owner* owner = part != nullptr ? find_owner(*part, peer) : nullptr;
  // Also of a part that has failed: the other hosts may be through with it only when this owner is.
  if (owner == nullptr || owner->granted) return;
  owner->granted = true;
  if (!part->contributes) return;
  if (part->has_partial) return push_to(*part, *owner);
  ask_for_partial(*part);
}

Errc Exchange::failed(PeerId peer, const Frame& frame) {
  const auto code = static_cast<Errc>(frame.code);
  if (code != Errc::kMismatch && code != Errc::kPeerLost) return Errc::kInternal;  // nothing else fails a round
  Part* part = find(frame);
  if (part == nullptr) return Errc::kOk;
  if (Owner* owner = find_owner(*part, peer); owner != nullptr) {
    owner->failed = true;
    settle_eager(*owner);
  }
  fail(*part, {code, frame.member});
  return Errc::kOk;
}

void Exchange::fail(Part& part, Failure failure) {
  if (part.failure.code != Errc::kOk) return conclude_if_over(part);
  part.failure = failure;
  Operation& operation = *part.task->operation;
  operation.note_failure(failure);
  // The ranks disagree: so they do about the other parts, and no owner will ever grant those. (When somebody has left, every
  // part is answered by itself.)
  for (std::uint32_t index = 0; failure.code == Errc::kMismatch && index < operation.part_count; ++index) {
    const auto found = parts_.find(operation.parts[index].key());
    if (found == parts_.end() || found->second.get() == &part) continue;
    Part& other = *found->second;
    if (other.round == part.round && other.failure.code == Errc::kOk) {
      other.failure = failure;
      conclude_if_over(other);
    }
  }
  conclude_if_over(part);
}

void Exchange::conclude_if_over(Part& part) {
  if (part.unsent != 0 || part.receiving != 0) return;
  if (part.failure.code == Errc::kOk) {
    if (part.left != 0) return;
  } else {
    // Our partial is being made by all ranks of the host; it must not be given up under their hands.
    if (part.asked && !part.has_partial) return;
    for (const Owner& owner : part.owners) {
      const bool is_through = owner.failed || owner.left == 0 || gone_[owner.peer].code != Errc::kOk;
      if (!is_through && part.announced && (owner.granted || part.failure.code != Errc::kMismatch)) return;
    }
  }
  auto node = parts_.extract(part.key);
  conclude(std::move(node.mapped()));
}

void Exchange::conclude(std::unique_ptr<Part> part) noexcept {
  PartTask& task = *part->task;
  for (Owner& owner : part->owners) settle_eager(owner);
  if (part->direct) {
    // A broadcast's root is answered with nothing: its own output, if it has one, it fills itself.
    const bool is_root = task.operation->collective == Collective::kBroadcast && part->contributes;
    if (is_root && part->failure.code == Errc::kOk && task.bytes() != 0 && task.output() != task.input()) {
      std::memcpy(task.output(), task.input(), task.bytes());
    }
    context_.tasks.remove(task);
    finish_part(task, part->failure, context_.finished);
  } else {
    RowHead& head = task.row.head();
    const RowIndex row = task.row_index;
    const bool failed = part->failure.code != Errc::kOk;
    if (failed && !context_.table.aborted()) {
      // Nobody reads it any more; only in a job that is over might a neighbour still be writing.
      if (!part->partial_place.is_nowhere()) context_.arena.free(part->partial_place.offset());
      if (!part->result_place.is_nowhere() && part->result_place.bits() != part->partial_place.bits()) {
        context_.arena.free(part->result_place.offset());
      }
    }
    if (failed) {
      // Our own shutdown is, to the other ranks of the host, a rank that has left.
      const bool is_shutdown = part->failure.code == Errc::kShutDown;
      task.row.fail(part->round,
                    is_shutdown ? Failure{Errc::kPeerLost, context_.global_ranks[context_.local_rank]} : part->failure);
    } else {
      head.partial.store(part->partial_place.bits(), std::memory_order_relaxed);
      head.result.store(part->result_place.bits(), std::memory_order_relaxed);
    }
    task.in_exchange.store(false, std::memory_order_release);
    // From the next line on the task may be finished and gone.
    if (!failed) head.exchanged.store(part->round, std::memory_order_release);
    context_.table.announce_all(row);
  }
  part->owners.clear();
  part->pieces.clear();
  auto owners = std::move(part->owners);
  auto pieces = std::move(part->pieces);
  *part = Part();
  part->owners = std::move(owners);
  part->pieces = std::move(pieces);
  spare_.push_back(std::move(part));
}

void Exchange::on_sent(PeerId, const OutFrame& out) noexcept {
  if (out.context == nullptr || out.frame.payload_bytes == 0) return;
  // A part stays until all its frames have left, so the context is good.
  Part& part = *static_cast<Part*>(out.context);
  --part.unsent;
  conclude_if_over(part);
}

void Exchange::on_peer_left(PeerId peer, std::uint32_t member) noexcept {
  gone_[peer] = {Errc::kPeerLost, member};
  std::vector<Part*> hit;
  for (const auto& entry : parts_) {
    const Owner* owner = find_owner(*entry.second, peer);
    if (owner != nullptr && owner->left != 0) hit.push_back(entry.second.get());
  }
  for (Part* part : hit) {
    // One failure may conclude others.
    const bool is_alive = std::ranges::any_of(parts_, [part](const auto& entry) { return entry.second.get() == part; });
    if (is_alive) fail(*part, gone_[peer]);
  }
}

void Exchange::fail_all(Failure failure) noexcept {
  (void)take_messages();
  while (!parts_.empty()) {
    auto node = parts_.extract(parts_.begin());
    node.mapped()->failure = failure;
    conclude(std::move(node.mapped()));
  }
}

}  // namespace commlib
