// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "loops/plan.hpp"
#include "loops/slices.hpp"

namespace commlib {

namespace {

Row& row_of(PartTask& task) noexcept { return task.row; }
std::uint64_t round_of(const PartTask& task) noexcept { return task.operation->round; }
RowEntry& my_entry(const LocalContext& context, const PartTask& task) noexcept {
  return task.row.entry(context.local_rank);
}

void announce_to_others(const LocalContext& context, const PartTask& task, News news = News::kWork) noexcept {
  context.table.announce_all(task.row_index, context.local_rank, news);
}

bool has_anyone_left(const LocalContext& context) noexcept {
  for (std::uint32_t rank = 0; rank < context.local_size; ++rank) {
    if (context.table.has_left(rank)) return true;
  }
  return false;
}

bool is_anyone_missing_and_gone(const LocalContext& context, const PartTask& task) noexcept {
  for (std::uint32_t rank = 0; rank < context.local_size; ++rank) {
    if (context.table.has_left(rank) && !task.row.has_arrived(rank, round_of(task))) return true;
  }
  return false;
}

// Is the round over, with success, as far as this row can tell?
bool is_done(const PartTask& task) noexcept {
  return task.row.all_done(round_of(task), task.slice_count) ||
         task.row.head().exchanged.load(std::memory_order_acquire) >= round_of(task);
}

// Has the round failed? Only where it is not done: the word may speak of a later round.
bool has_failed(const PartTask& task) noexcept {
  return task.row.failure(round_of(task)).code != Errc::kOk && !is_done(task);
}

// One host: all have arrived and agree, or the round fails for all.
Errc meet(LocalContext& context, PartTask& task) noexcept {
  const std::uint64_t round = round_of(task);
  switch (task.row.meeting(round, task.operation->hash)) {
    // One that has arrived may have given up since: it has shut down.
    case Row::Meeting::kAgree:
      return has_failed(task) ? Errc::kAgain : Errc::kOk;
    case Row::Meeting::kOver:
      return is_done(task) ? Errc::kOk : Errc::kAgain;
    case Row::Meeting::kDisagree:
      task.row.fail(round, {Errc::kMismatch, Failure::kNobody});
      announce_to_others(context, task);
      return Errc::kAgain;
    case Row::Meeting::kMissing:
      break;
  }
  return Errc::kAgain;
}

// Several hosts: the local root says so to the exchange, the others go on.
Errc announce(LocalContext& context, PartTask& task) noexcept {
  if (!context.is_local_root()) return Errc::kOk;
  const Row::Meeting meeting = task.row.meeting(round_of(task), task.operation->hash);
  if (meeting != Row::Meeting::kAgree && meeting != Row::Meeting::kDisagree) return Errc::kAgain;
  if (has_failed(task)) return Errc::kAgain;
  task.in_exchange.store(true, std::memory_order_relaxed);  // the door's inbox publishes it
  context.exchange->announce(task, meeting == Row::Meeting::kAgree);
  return Errc::kOk;
}

// Rows that need staging wait for the local root's grant; all others pass.
Errc admit(LocalContext& context, PartTask& task) noexcept {
  const std::uint64_t round = round_of(task);
  if (task.row.all_staged(round)) return Errc::kOk;
  if (context.is_local_root() && !task.admission_asked) {
    task.admission_asked = true;
    context.admission->ask(task.row_index, round, task.bytes() * context.local_size, task.operation->priority);
  }
  return task.row.head().granted.load(std::memory_order_acquire) >= round ? Errc::kOk : Errc::kAgain;
}

Errc await_grant(LocalContext&, PartTask& task) noexcept {
  return task.row.head().granted.load(std::memory_order_acquire) >= round_of(task) ? Errc::kOk : Errc::kAgain;
}

// An input that the others cannot reach is copied to where they can.
Errc stage_in(LocalContext& context, PartTask& task) noexcept {
  RowEntry& mine = my_entry(context, task);
  if (mine.staged.load(std::memory_order_relaxed) >= round_of(task)) return Errc::kOk;
  const std::uint64_t offset = context.arena.allocate(task.bytes());
  if (offset == Arena::kNoSpace) {
    // Other hosts wait for what this one has announced, and there is no taking back.
    if (context.several_hosts) context.table.abort(context.global_ranks[context.local_rank], Cause::kMemory);
    task.row.fail(round_of(task), {Errc::kOutOfMemory, context.global_ranks[context.local_rank]});
    announce_to_others(context, task);
    return Errc::kAgain;
  }
  task.staging = offset;
  std::memcpy(context.arena_bases[context.local_rank] + offset, task.input(), task.bytes());
  const std::uint64_t place = Place::in_arena(context.local_rank, offset).bits();
  mine.input.store(place, std::memory_order_relaxed);
  mine.output.store(place, std::memory_order_relaxed);
  if (row_of(task).finish_staging(round_of(task), context.local_rank)) announce_to_others(context, task);
  return Errc::kOk;
}

// A slice once claimed is nobody else's: if it cannot be done the job is over. A neighbour that has died is found, and named,
// by the watch; one that has shut down has taken its memory with it; anything else is ours to tell.
Errc lost_slice(const LocalContext& context, Errc code) noexcept {
  if (has_anyone_left(context)) context.table.abort(context.table.first_leaver(), Cause::kLeft);
  if (code != Errc::kPeerLost) context.table.abort(context.global_ranks[context.local_rank], Cause::kInternal);
  return Errc::kAgain;
}

// Who breaks off what he has submitted ends the job, and only then gives its memory back: what was read until then is what he
// had put in.
Errc read_in_time(const LocalContext& context) noexcept { return context.table.aborted() ? Errc::kAgain : Errc::kOk; }

// Do slices as long as there are any to take.
template <auto kDoSlice>
Errc do_slices(LocalContext& context, PartTask& task) noexcept {
  const std::uint64_t round = round_of(task);
  if (!task.row.all_staged(round)) return Errc::kAgain;
  for (int slice; (slice = task.row.claim(round, context.local_rank, task.slice_count)) >= 0;) {
    const auto index = static_cast<std::uint32_t>(slice);
    const Errc code = kDoSlice(context, task, index);
    if (code != Errc::kOk) return lost_slice(context, code);
    if (read_in_time(context) != Errc::kOk) return Errc::kAgain;
    if (task.row.finish_slice(round, index, context.local_rank, task.slice_count)) {
      announce_to_others(context, task, News::kEnd);
    }
  }
  return task.row.all_done(round, task.slice_count) ? Errc::kOk : Errc::kAgain;
}

// Fetch what others have done into an output that only this process can write.
Errc collect(LocalContext& context, PartTask& task) noexcept {
  RowEntry& mine = my_entry(context, task);
  if (mine.copied.load(std::memory_order_relaxed) >= round_of(task)) return Errc::kOk;
  for (std::uint32_t slice = 0; slice < task.slice_count; ++slice) {
    if (task.row.executor(slice) == context.local_rank) continue;
    if (context.table.aborted()) return Errc::kAgain;
    if (const Errc code = collect_slice(context, task, slice); code != Errc::kOk) return lost_slice(context, code);
  }
  if (read_in_time(context) != Errc::kOk) return Errc::kAgain;
  if (task.row.finish_copying(round_of(task), context.local_rank)) announce_to_others(context, task, News::kEnd);
  return Errc::kOk;
}

// Nobody completes while another may still read his output.
Errc let_go(LocalContext&, PartTask& task) noexcept {
  return task.row.all_copied(round_of(task)) ? Errc::kOk : Errc::kAgain;
}

Errc stage_out(LocalContext& context, PartTask& task) noexcept {
  if (task.staging != Arena::kNoSpace) unstage_all_but_own(context, task);
  return Errc::kOk;
}

// A small sum: have all arrived, and said the same? What they have said of this round stands there until all are through
// with it, and a rank that has put in something else, and not a small one, has said nothing of this round there.
Errc compare(LocalContext& context, PartTask& task) noexcept {
  const std::uint64_t round = round_of(task);
  if (!task.row.all_arrived(round)) return Errc::kAgain;
  bool agree = true;
  for (std::uint32_t rank = 0; rank < context.local_size; ++rank) {
    const CopyHead* const said = copy_of(context, task, rank);
    agree = agree && said->round == round && said->hash == task.operation->hash;
  }
  // One that has arrived may have given up since: it has shut down.
  if (agree) return task.row.has_failed(round) ? Errc::kAgain : Errc::kOk;
  task.row.fail(round, {Errc::kMismatch, Failure::kNobody});
  announce_to_others(context, task);
  return Errc::kAgain;
}

// From here on nobody needs anybody any more: each finds all there is.
Errc sum_for_itself(LocalContext& context, PartTask& task) noexcept {
  sum_copies(context, task);
  return read_in_time(context);
}

Errc contribute(LocalContext& context, PartTask& task) noexcept {
  if (context.is_local_root()) context.exchange->contribute(task);
  return Errc::kOk;
}

Errc local_broadcast(LocalContext& context, PartTask& task) noexcept {
  const RowHead& head = task.row.head();
  if (head.exchanged.load(std::memory_order_acquire) < round_of(task)) return Errc::kAgain;
  const Place place = Place::from_bits(head.result.load(std::memory_order_relaxed));
  const std::byte* const result = context.arena_bases[place.arena()] + place.offset();
  if (!context.has_it(*task.operation) && task.bytes() != 0) std::memcpy(task.output(), result, task.bytes());
  if (row_of(task).finish_copying(round_of(task), context.local_rank)) context.table.announce(task.row_index, 0);
  return Errc::kOk;
}

// The local root gives the host's partial and result back when every rank has its copy.
Errc release(LocalContext& context, PartTask& task) noexcept {
  if (!context.is_local_root()) return Errc::kOk;
  if (!task.row.all_copied(round_of(task))) return Errc::kAgain;
  const Place partial = Place::from_bits(task.row.head().partial.load(std::memory_order_relaxed));
  const Place result = Place::from_bits(task.row.head().result.load(std::memory_order_relaxed));
  if (!partial.is_nowhere()) context.arena.free(partial.offset());
  if (result.bits() != partial.bits()) context.arena.free(result.offset());
  return Errc::kOk;
}

constexpr Stage kOneHost[] = {meet, admit, stage_in, do_slices<sum_slice>, collect, let_go, stage_out};
constexpr Stage kSmall[] = {compare, sum_for_itself};
constexpr Stage kHosts[] = {announce,   await_grant,     stage_in, do_slices<reduce_slice>,
                            contribute, local_broadcast, release};
constexpr Stage kReceive[] = {announce, local_broadcast, release};

// Has the task failed, seen from the outside of its stages?
Failure failure_of(const LocalContext& context, const PartTask& task) noexcept {
  // What the exchange holds fails through the exchange, when it has let go of the memory.
  if (task.in_exchange.load(std::memory_order_acquire)) return {};
  if (context.table.aborted()) return {Errc::kPeerLost, context.table.aborted_member()};
  if (const Failure failure = task.row.failure(round_of(task)); failure.code != Errc::kOk) return failure;
  if (is_anyone_missing_and_gone(context, task)) return {Errc::kPeerLost, context.table.first_leaver()};
  // Another part has failed: this one will never be complete if the ranks do not even agree about it. A part for which
  // all have arrived and agree runs to its end.
  const std::uint64_t word = task.operation->first_failure.load(std::memory_order_acquire);
  if (word == 0 || is_done(task)) return {};
  if (task.row.meeting(round_of(task), task.operation->hash) == Row::Meeting::kAgree) return {};
  return {static_cast<Errc>(word >> 32), static_cast<std::uint32_t>(word)};
}

void finish(LocalContext& context, PartTask& task, Failure failure) noexcept {
  task.finished = true;
  if (task.staging != Arena::kNoSpace) context.arena.free(task.staging);
  context.staged_bytes.fetch_sub(task.staging_charge, std::memory_order_relaxed);
  if (task.admission_asked) context.admission->give_back(task.bytes() * context.local_size);
  if (failure.code != Errc::kOk && !context.table.aborted()) {
    // Who arrives here later in this round must not take us for one who will carry it out.
    task.row.fail(round_of(task), failure);
    announce_to_others(context, task);
    if (failure.code == Errc::kPeerLost && context.exchange != nullptr && has_anyone_left(context))
      context.exchange->leave(failure.member);
    // The other parts of the operation have to look at themselves; each has its own holder.
    Operation& operation = *task.operation;
    operation.note_failure(failure);
    for (std::uint32_t part = 0; part < operation.part_count; ++part) {
      if (&operation.parts[part] != &task) context.table.announce(operation.parts[part].row_index, context.local_rank);
    }
  }
  context.tasks.remove(task);
  finish_part(task, failure, context.finished);
}

}  // namespace

Plan plan_for(const LocalContext& context, const Operation& operation) noexcept {
  if (context.is_small(operation)) return kSmall;
  if (!context.several_hosts) return kOneHost;
  return context.contributes(operation) ? Plan(kHosts) : Plan(kReceive);
}

bool progress(LocalContext& context, PartTask& task) noexcept {
  const Plan plan = plan_for(context, *task.operation);
  bool looked_for_failure = false;
  Failure failure;
  while (task.stage < plan.size()) {
    if (plan[task.stage](context, task) == Errc::kOk) {
      ++task.stage;
      continue;
    }
    // Success first: a failure word may speak of a later round, in which case this round is over and the stage, tried once
    // more, says so.
    if (looked_for_failure) {
      finish(context, task, failure);
      return true;
    }
    failure = failure_of(context, task);
    if (failure.code == Errc::kOk) return false;
    looked_for_failure = true;
  }
  finish(context, task, {});
  return true;
}

}  // namespace commlib
