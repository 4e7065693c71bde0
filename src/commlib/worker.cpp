// SPDX-License-Identifier: Apache-2.0
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <new>
#include <utility>

#include "base/clock.hpp"
#include "base/cpu.hpp"
#include "base/spin.hpp"
#include "commlib/commlib.hpp"
#include "commlib/fork_guard.hpp"
#include "commlib/network_loop.hpp"
#include "loops/local_loop.hpp"
#include "loops/plan.hpp"
#include "loops/slices.hpp"
#include "memory/numa.hpp"
#include "reduce/reduce.hpp"
#include "sched/partition.hpp"
#include "sched/wire.hpp"
#include "transport/tcp.hpp"

namespace commlib {

namespace {

constexpr std::uint64_t kStageAtSubmissionBytes = 8
                                                  << 20;  // up to here copies are cheaper than reads through the kernel
constexpr std::uint64_t kStagingBudgetBytes = 64 << 20;
constexpr std::uint64_t kEagerBudgetBytes = 4 << 20;  // per pair of nodes
constexpr int kSpinUs = 20;

std::vector<std::vector<Fd>> own(std::vector<std::vector<int>>& streams) {
  std::vector<std::vector<Fd>> owned(streams.size());
  for (std::size_t peer = 0; peer < streams.size(); ++peer) {
    for (const int descriptor : streams[peer]) owned[peer].emplace_back(descriptor);
  }
  return owned;
}

}  // namespace

struct Worker::State : private ForkGuard::Member {
  explicit State(WorkerOptions given);
  ~State() override;

  Errc submit(const Request& request, std::shared_ptr<Operation>* out) noexcept;
  bool poll(Operation& operation) noexcept;
  bool take(Operation& operation) noexcept;
  bool drive(Operation& operation, int timeout_ms) noexcept;
  void hand_over(Operation& operation) noexcept;
  void settle();
  void shutdown(int timeout_ms) noexcept;
  void in_forked_child() noexcept override {
    is_forked = true;
    network.close();
  }

  // While one of these lives, shutdown waits. `closing` and `callers` are written and then read crosswise, hence the order.
  class Inside {
   public:
    explicit Inside(State& state) noexcept : state_(state) { state_.callers.fetch_add(1, std::memory_order_seq_cst); }
    ~Inside() {
      const bool is_last = state_.callers.fetch_sub(1, std::memory_order_seq_cst) == 1;
      if (is_last && state_.closing.load(std::memory_order_seq_cst)) futex_wake(state_.callers);
    }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    State& state_;
  };

  // Synchronous callers that may sleep in the ready table; 0: none free.
  std::uint32_t take_caller_slot() noexcept;
  void give_back_caller_slot(Operation& operation) noexcept;
  Row::Arrival place(PartTask& task, Driver driver);
  void stage_at_submission(PartTask& task, Row::Arrival* arrival);
  void start(PartTask& task, Driver driver);
  bool is_in_arena(const void* memory, std::size_t bytes) const noexcept;
  bool sit_down(Operation& operation, bool may_spin) noexcept;
  bool spin_until_met(const PartTask& task) noexcept;
  int spinning_us() noexcept;
  void let_loop(PartTask& task) noexcept;
  void fail_rest() noexcept;
  void give_up_job() noexcept;
  void loop_failed(const char* what) noexcept;

  WorkerOptions options;
  bool is_forked = false;  // only ever written in a child, before anything else runs there
  LogBuffer log;
  Segment table_segment;
  std::vector<Segment> arena_segments;  // by local rank
  ReadyTable table;
  Arena arena;
  TaskTable tasks;
  FinishedList finished;
  std::atomic<std::uint64_t> staged_bytes{0};
  std::atomic<std::uint64_t> finished_bytes{0};
  std::uint64_t probe_word = kProbeValue;
  LocalAdmission admission;
  LocalContext context;
  Watch watch;
  NetworkLoop network;
  std::unique_ptr<Egress> egress;
  std::unique_ptr<ServerEngine> engine;
  std::unique_ptr<Exchange> exchange;
  LocalLoop local;
  Runner network_runner;
  Runner local_runner;
  std::atomic<std::uint32_t> caller_slots{0};  // bit set: taken
  std::atomic<bool> closing{false};
  std::atomic<std::uint32_t> callers{0};  // threads inside submit() and drive(); futex word of shutdown
  std::atomic<int> spin_us;               // −1: not known yet
};

namespace {

std::vector<Segment> map_arenas(const WorkerOptions& options) {
  std::vector<Segment> segments;
  for (std::uint32_t rank = 0; rank < options.local_size; ++rank) {
    segments.emplace_back(options.arena_fds.at(rank), options.arena_bytes.at(rank));
    segments.back().advise_huge_pages();
  }
  return segments;
}

// The arena belongs near the CPUs of its rank: where those are all of one node. A process that may run anywhere keeps the
// kernel's own rule, first touch; so it is where binding is not permitted.
void bind_near_cpus(const Segment& segment) noexcept {
  const NumaTopology topology = NumaTopology::read();
  const std::vector<int> cpus = affinity_cpus();
  if (cpus.empty()) return;
  const int node = topology.node_of_cpu(cpus.front());
  const bool is_one = std::ranges::all_of(cpus, [&](int cpu) { return topology.node_of_cpu(cpu) == node; });
  if (is_one && node >= 0) (void)bind_to_node(topology, segment.data(), segment.bytes(), node);
}

LocalContext make_context(ReadyTable& table, TaskTable& tasks, FinishedList& finished, Arena& arena,
                          std::atomic<std::uint64_t>& staged_bytes, const WorkerOptions& options,
                          const std::vector<Segment>& segments, LogBuffer* log) {
  LocalContext context{table, tasks, finished, arena, staged_bytes};
  for (const Segment& segment : segments) context.arena_bases.push_back(segment.data());
  context.pids = options.local_pids;
  context.pids.resize(options.local_size);
  context.global_ranks = options.local_ranks;
  context.local_rank = options.local_rank;
  context.local_size = options.local_size;
  context.several_hosts = options.nodes > 1;
  context.log = log;
  return context;
}

void check(const WorkerOptions& options) {
  check_partition_bytes(options.partition_bytes);
  const bool fits = options.local_size >= 1 && options.local_rank < options.local_size && options.rank < options.size &&
                    options.local_ranks.size() == options.local_size && options.node_of_rank.size() == options.size &&
                    options.arena_fds.size() == options.local_size &&
                    options.arena_bytes.size() == options.local_size && options.roots.size() == options.nodes &&
                    options.ranks_per_host.size() == options.nodes && options.local_size <= kMaxLocalRanks;
  if (!fits) throw Error(Errc::kConfig, "the topology of the job contradicts itself");
}

std::vector<std::uint32_t> members(const std::vector<std::uint32_t>& roots, std::uint32_t servers) {
  std::vector<std::uint32_t> members = roots;
  for (std::uint32_t index = 0; index < servers; ++index) members.push_back(kServerBit | index);
  return members;
}

}  // namespace

Worker::State::State(WorkerOptions given)
    : options((check(given), std::move(given))),
      log(static_cast<LogLevel>(options.log_level)),
      table_segment(options.table_fd, ReadyTable::bytes_needed(options.local_size)),
      arena_segments(map_arenas(options)),
      table(table_segment, options.local_rank, options.local_size),
      arena(arena_segments[options.local_rank], 0, arena_segments[options.local_rank].bytes()),
      admission(table, kStagingBudgetBytes * options.local_size),
      context(make_context(table, tasks, finished, arena, staged_bytes, options, arena_segments, &log)),
      watch(
          {options.local_rank, options.local_pids, options.local_sockets, options.local_ranks, options.peer_timeout_ms},
          table, &log),
      network({options.node, members(options.roots, options.servers), options.peer_timeout_ms}, table, &watch, &log),
      local(context, network, 0),
      network_runner("cl-net", network, [this](const char* what) { loop_failed(what); }),
      local_runner("cl-local", local, [this](const char* what) { loop_failed(what); }),
      spin_us(-1) {
  bind_near_cpus(arena_segments[options.local_rank]);
  if (options.local_rank == 0) {
    context.admission = &admission;
    if (options.nodes > 1) {
      const std::uint32_t peers = options.nodes + options.servers;
      // Only so a host is sent more than a dedicated server, or less; see sched/placement.hpp.
      const bool is_uneven = options.servers > 1 && options.servers < options.nodes;
      egress = std::make_unique<Egress>(peers, options.node, is_uneven);
      engine = std::make_unique<ServerEngine>(
          EngineOptions{options.node, options.nodes, options.servers, options.ranks_per_host,
                        enough_credit(options.credit_bytes, options.nodes), kEagerBudgetBytes, options.partition_bytes},
          *egress, &log);
      exchange = std::make_unique<Exchange>(
          ExchangeOptions{options.node, options.nodes, options.servers, options.node_of_rank, kEagerBudgetBytes},
          context, *egress, network);
      context.exchange = exchange.get();
      TcpOptions tcp;
      tcp.peer_timeout_ms = 0;  // beats tell who is silent; the kernel would go on counting while we are stopped
      tcp.phase = (options.node + 1) % peers;
      network.attach(std::make_unique<TcpTransport>(own(options.streams), tcp), *egress, *engine, exchange.get());
    }
  }
  table.publish_cpus(affinity_cpus());
  table.status(options.local_rank)
      .probe.store(reinterpret_cast<std::uintptr_t>(&probe_word), std::memory_order_release);
  table.ring_all();
  if (!options.threads) return;
  network_runner.start();
  local_runner.start();
}

Worker::State::~State() { shutdown(0); }

// Before something in flight is broken off: others may be using its memory, or have been promised it, and must not take for a
// sum what they find there when it has been given back.
void Worker::State::give_up_job() noexcept { table.abort(options.rank, Cause::kLeft); }

void Worker::State::loop_failed(const char* what) noexcept {
  COMMLIB_LOG(&log, LogLevel::kError, "a loop of rank %u failed: %s", options.rank, what);
  table.abort(options.rank, Cause::kInternal);
}

bool Worker::State::is_in_arena(const void* memory, std::size_t bytes) const noexcept {
  const Segment& mine = arena_segments[options.local_rank];
  const auto* at = static_cast<const std::byte*>(memory);
  return at >= mine.data() && bytes <= mine.bytes() && at <= mine.data() + (mine.bytes() - bytes);
}

// How the others reach this part's memory, and how they tell us of it.
Row::Arrival Worker::State::place(PartTask& task, Driver driver) {
  const Operation& operation = *task.operation;
  Row::Arrival arrival{.round = operation.round,
                       .hash = operation.hash,
                       .input = Place::nowhere(),
                       .output = Place::nowhere(),
                       .staged = true,
                       .copied = !context.several_hosts,
                       .keeps = false,
                       .caller = operation.caller_slot};
  const bool puts_in = is_sum(operation.collective) ||
                       (operation.collective == Collective::kBroadcast && operation.root == options.rank);
  if (context.is_small(operation)) {
    CopyHead* const head = copy_of(context, task, options.local_rank);
    *head = {operation.round, operation.hash};
    if (puts_in && task.bytes() != 0) std::memcpy(head + 1, task.input(), task.bytes());
    // Nobody has to be woken before somebody wants the result.
    if (driver == Driver::kLater || operation.is_callers) arrival.caller = kLooksLater;
    return arrival;
  }
  const bool takes_out = !context.several_hosts;  // else every rank copies its result out itself
  const auto place_of = [&](const void* memory) {
    if (!is_in_arena(memory, task.bytes())) return Place::at_address(memory);
    const std::byte* base = arena_segments[options.local_rank].data();
    return Place::in_arena(options.local_rank,
                           static_cast<std::uint64_t>(static_cast<const std::byte*>(memory) - base));
  };
  const Place input = puts_in ? place_of(task.input()) : Place::nowhere();
  const Place output = takes_out ? place_of(task.output()) : Place::nowhere();
  const bool is_ordinary = input.is_address() || output.is_address();
  const bool is_small = operation.bytes() <= kStageAtSubmissionBytes;
  const bool can_read =
      options.route != LocalRoute::kStaged &&
      table.status(options.local_rank).reachable_by.load(std::memory_order_relaxed) + 1 == options.local_size;
  if (is_ordinary && task.bytes() != 0 && options.local_size > 1) {
    if (is_small && options.route != LocalRoute::kCma) stage_at_submission(task, &arrival);
    if (!can_read && task.staging == Arena::kNoSpace) {
      arrival.staged = false;
      return arrival;
    }
  }
  if (task.staging == Arena::kNoSpace) {
    arrival.copied = arrival.copied && (!output.is_address() || context.has_it(operation));
    arrival.input = input;
    arrival.output = output;
  }
  // What the last to arrive can do alone needs nobody's attention before somebody wants the result.
  const bool is_done_by_one = !context.several_hosts && operation.part_count == 1 && task.slice_count == 1;
  if (driver == Driver::kLater && is_done_by_one && arrival.copied && options.local_size > 1) {
    arrival.caller = kLooksLater;
  }
  return arrival;
}

void Worker::State::stage_at_submission(PartTask& task, Row::Arrival* arrival) {
  const std::uint64_t bytes = task.bytes();
  if (staged_bytes.fetch_add(bytes, std::memory_order_relaxed) + bytes > kStagingBudgetBytes) {
    staged_bytes.fetch_sub(bytes, std::memory_order_relaxed);
    return;
  }
  task.staging_charge = bytes;
  task.staging = arena.allocate(bytes);
  if (task.staging == Arena::kNoSpace) return;
  arrival->input = arrival->output = Place::in_arena(options.local_rank, task.staging);
  // Its own slice a rank does itself, on its own memory.
  arrival->keeps = task.keeps_own_slice = task.slice_count > 1;
  stage_all_but_own(context, task);
}

Errc Worker::State::submit(const Request& request, std::shared_ptr<Operation>* out) noexcept {
  if (is_forked) return Errc::kNotInitialized;
  const Inside inside(*this);
  if (closing.load(std::memory_order_seq_cst)) return Errc::kShutDown;
  if (table.aborted()) return Errc::kPeerLost;
  const std::size_t item = item_bytes(request.dtype);
  const std::uint32_t parts = part_count(request.count * item, options.partition_bytes);
  if (request.key->rows() < parts) return Errc::kInternal;
  if (options.route == LocalRoute::kArena && options.local_size > 1 && request.count != 0 &&
      !(is_in_arena(request.input, request.count * item) && is_in_arena(request.output, request.count * item))) {
    return Errc::kUnsupported;
  }
  std::shared_ptr<Operation> operation;
  try {
    operation = std::make_shared<Operation>();
    operation->parts = std::make_unique<PartTask[]>(parts);
  } catch (const std::bad_alloc&) {
    return Errc::kOutOfMemory;
  }
  operation->key = request.key;
  operation->round = request.key->round.fetch_add(1, std::memory_order_relaxed) + 1;
  operation->hash = request.hash;
  operation->collective = request.collective;
  operation->op = request.op;
  operation->dtype = request.dtype;
  operation->root = request.root;
  operation->priority = request.priority;
  operation->input = static_cast<const std::byte*>(request.input);
  operation->output = static_cast<std::byte*>(request.output);
  operation->count = request.count;
  operation->custody = request.custody;
  operation->part_count = parts;
  operation->submitted_ms = now_ms();
  operation->parts_left.store(parts, std::memory_order_relaxed);
  operation->self = operation;
  if (request.driver == Driver::kCaller && !context.several_hosts && options.local_size > 1) {
    const bool is_small = context.is_small(*operation);
    // For a small sum the caller first spins, and needs a slot only when he sleeps.
    if (!is_small) operation->caller_slot = take_caller_slot();
    operation->is_callers = is_small || operation->caller_slot != 0;
  }
  *out = operation;
  for (std::uint32_t index = 0; index < parts; ++index) {
    PartTask& task = operation->parts[index];
    const PartRange range = part_range(index, request.count, item, options.partition_bytes);
    task.operation = operation.get();
    task.part = index;
    task.first = range.first;
    task.count = range.count;
    task.row_index = request.key->row_of(index);
    task.row = table.row(task.row_index);
    task.slice_count = slice_count_of(task.bytes(), options.local_size);
  }
  // All are complete before the first can fail, and look at the others.
  for (std::uint32_t index = 0; index < parts; ++index) start(operation->parts[index], request.driver);
  return Errc::kOk;
}

void Worker::State::start(PartTask& task, Driver driver) {
  const Operation& operation = *task.operation;
  const bool is_alone = options.local_size == 1;
  if (is_alone && context.several_hosts && wire_dtype(operation.dtype, operation.op) == operation.dtype) {
    task.holder.store(Holder::kExchange, std::memory_order_relaxed);
    tasks.add(task);
    exchange->submit(task);
    return;
  }
  const bool is_callers = operation.is_callers;
  task.holder.store(is_callers ? Holder::kCaller : Holder::kSubmitter, std::memory_order_relaxed);
  const Row::Arrival arrival = place(task, driver);
  tasks.add(task);
  const RowIndex row = task.row_index;
  const Row shared = task.row;
  const bool is_complete = shared.arrive(options.local_rank, arrival);
  // Of a small sum the others are told at once: each does it for himself, when he comes to it.
  const bool is_small = context.is_small(operation);
  if (is_small && is_complete) table.announce_all(row, options.local_rank, News::kEnd);
  // What one rank does alone is done by the last to arrive, on the spot; the others hear of it when it is done.
  const bool is_quick =
      !context.several_hosts && task.slice_count == 1 && is_complete && shared.all_staged(operation.round);
  if (is_callers) {
    if (is_quick && operation.part_count == 1 && progress(context, task)) give_back_caller_slot(*task.operation);
    if (is_complete && !is_quick) table.announce_all(row, options.local_rank);
    return;
  }
  if (is_quick && progress(context, task)) return;
  const bool has_failed = operation.has_failed();
  Holder expected = Holder::kSubmitter;
  const Holder next = arrival.caller == kLooksLater ? Holder::kNobody : Holder::kLoop;
  const bool was_quiet = task.holder.compare_exchange_strong(expected, next, std::memory_order_acq_rel);
  if (!was_quiet) task.holder.store(Holder::kLoop, std::memory_order_release);
  // From here on the task is the loop's, or whoever's who looks, and may be gone.
  if (!was_quiet || has_failed || table.aborted()) table.post(row, options.local_rank);
  // Whoever has left before will not tell us what he has not done, nor that he will not do it.
  for (std::uint32_t rank = 0; rank < options.local_size; ++rank) {
    if (table.has_left(rank)) table.post(row, options.local_rank);
  }
  if (!is_complete) return;
  if (context.several_hosts) {
    table.announce(row, 0);
  } else if (!is_quick) {
    table.announce_all(row);
  }
}

std::uint32_t Worker::State::take_caller_slot() noexcept {
  std::uint32_t seen = caller_slots.load(std::memory_order_relaxed);
  while (seen != UINT32_MAX) {
    const auto slot = static_cast<std::uint32_t>(__builtin_ctz(~seen));
    if (caller_slots.compare_exchange_weak(seen, seen | 1u << slot, std::memory_order_acq_rel)) return slot + 1;
  }
  return 0;
}

void Worker::State::give_back_caller_slot(Operation& operation) noexcept {
  if (operation.caller_slot == 0) return;
  caller_slots.fetch_and(~(1u << (operation.caller_slot - 1)), std::memory_order_acq_rel);
  operation.caller_slot = 0;
}

// Only what is to be looked at later is nobody's, and that has one part.
bool Worker::State::take(Operation& operation) noexcept {
  Holder expected = Holder::kNobody;
  return operation.parts[0].holder.compare_exchange_strong(expected, Holder::kCaller, std::memory_order_acq_rel);
}

bool Worker::State::poll(Operation& operation) noexcept {
  if (operation.completion.done() || is_forked) return operation.completion.done();
  const Inside inside(*this);
  if (closing.load(std::memory_order_seq_cst)) return false;
  PartTask& task = operation.parts[0];
  Holder expected = Holder::kNobody;
  if (!task.holder.compare_exchange_strong(expected, Holder::kSubmitter, std::memory_order_acq_rel)) return false;
  if (progress(context, task)) return true;
  expected = Holder::kSubmitter;
  if (!task.holder.compare_exchange_strong(expected, Holder::kNobody, std::memory_order_acq_rel)) let_loop(task);
  return false;
}

// The driver of what was to be looked at later, whom nobody tells anything yet, gets a slot. False if it needs none: it is
// done, or, there being none, the loop's.
bool Worker::State::sit_down(Operation& operation, bool may_spin) noexcept {
  PartTask& task = operation.parts[0];
  if (task.holder.load(std::memory_order_relaxed) != Holder::kCaller || progress(context, task)) return false;
  if (may_spin && spin_until_met(task) && progress(context, task)) return false;
  operation.caller_slot = take_caller_slot();
  if (operation.caller_slot == 0) {
    let_loop(task);
    return false;
  }
  // See ReadyTable::announce: who has not seen the slot changed the row before we look at it again.
  (void)task.row.entry(options.local_rank).caller.exchange(operation.caller_slot, std::memory_order_seq_cst);
  return true;
}

// How long a waiter spins before it sleeps. Who spins where another has to run costs it milliseconds.
int Worker::State::spinning_us() noexcept {
  int known = spin_us.load(std::memory_order_relaxed);
  if (known >= 0) return known;
  const Errc enough = table.enough_cpus();
  if (enough == Errc::kAgain) return 0;
  known = enough == Errc::kOk ? kSpinUs : 0;
  spin_us.store(known, std::memory_order_relaxed);
  return known;
}

// The others are often no more than some microseconds behind. Who looks at what they write themselves is told soonest, and
// costs them nothing.
bool Worker::State::spin_until_met(const PartTask& task) noexcept {
  return spin_until(spinning_us(), [&] { return task.row.all_arrived(task.operation->round); });
}

bool Worker::State::drive(Operation& operation, int timeout_ms) noexcept {
  const Inside inside(*this);
  // Who comes after shutdown has begun finds it ended by that; who came before ends it himself, below, and is waited for.
  if (closing.load(std::memory_order_seq_cst)) return operation.completion.wait(timeout_ms);
  if (operation.caller_slot == 0 && !sit_down(operation, timeout_ms != 0)) return operation.completion.wait(timeout_ms);
  const std::int64_t deadline_ms = timeout_ms < 0 ? INT64_MAX : now_ms() + timeout_ms;
  Doorbell& bell = table.status(options.local_rank).callers[operation.caller_slot - 1];
  for (;;) {
    const std::uint32_t ticket = bell.ticket();
    for (std::uint32_t index = 0; index < operation.part_count; ++index) {
      PartTask& task = operation.parts[index];
      if (task.finished) continue;
      if (progress(context, task)) continue;
      if (!closing.load(std::memory_order_acquire)) continue;
      give_up_job();
      task.finished = true;
      tasks.remove(task);
      finish_part(task, {Errc::kShutDown, Failure::kNobody}, finished);
    }
    if (operation.completion.done()) {
      give_back_caller_slot(operation);
      return true;
    }
    const std::int64_t left = deadline_ms == INT64_MAX ? 3'600'000 : deadline_ms - now_ms();
    if (left <= 0) return false;
    (void)bell.wait(ticket, static_cast<int>(std::min<std::int64_t>(left, 3'600'000)), spinning_us());
  }
}

// The task is the caller's; it becomes the loop's, and may then be gone.
void Worker::State::let_loop(PartTask& task) noexcept {
  const RowIndex row = task.row_index;
  // See ReadyTable::announce: who has not seen the 0 changed the row before the loop looks at it.
  (void)task.row.entry(options.local_rank).caller.exchange(0, std::memory_order_seq_cst);
  task.holder.store(Holder::kLoop, std::memory_order_release);
  table.post(row, options.local_rank);
}

void Worker::State::hand_over(Operation& operation) noexcept {
  const Inside inside(*this);
  if (closing.load(std::memory_order_seq_cst)) return;  // it ends with all the rest
  give_back_caller_slot(operation);
  for (std::uint32_t index = 0; index < operation.part_count; ++index) {
    PartTask& task = operation.parts[index];
    if (task.holder.load(std::memory_order_relaxed) == Holder::kCaller && !task.finished) let_loop(task);
  }
}

void Worker::State::settle() {
  std::vector<RowIndex> rows;
  tasks.rows(&rows);
  for (const RowIndex row : rows) {
    PartTask* task = tasks.take_from_nobody(row);
    if (task != nullptr && !progress(context, *task)) let_loop(*task);
  }
}

void Worker::State::shutdown(int timeout_ms) noexcept {
  if (is_forked || closing.exchange(true, std::memory_order_seq_cst)) return;
  settle();
  std::vector<RowIndex> in_flight;
  tasks.rows(&in_flight);
  if (!in_flight.empty()) give_up_job();
  table.leave(options.rank);
  if (exchange != nullptr) {
    network.finish();
    if (options.threads) network.wait_finished(timeout_ms);
  }
  for (std::uint32_t now; (now = callers.load(std::memory_order_seq_cst)) != 0;) futex_wait(callers, now, 100);
  local_runner.stop();
  network_runner.stop();
  network.close();
  fail_rest();
}

// Both loops have ended and no caller is inside: what is left is nobody's.
void Worker::State::fail_rest() noexcept {
  const Failure failure{Errc::kShutDown, Failure::kNobody};
  if (exchange != nullptr) exchange->fail_all(failure);
  std::vector<RowIndex> rows;
  tasks.rows(&rows);
  if (!rows.empty()) give_up_job();
  for (const RowIndex row : rows) {
    PartTask* task = tasks.find(row);
    if (task == nullptr) continue;
    // The others must not count on us, who had arrived.
    task->row.fail(task->operation->round, {Errc::kPeerLost, options.rank});
    table.announce_all(row, options.local_rank);
    task->finished = true;
    tasks.remove(*task);
    finish_part(*task, failure, finished);
  }
}

int current_exception(char* text, std::size_t bytes) noexcept {
  try {
    throw;
  } catch (const Error& error) {
    std::snprintf(text, bytes, "%s", error.what());
    return static_cast<int>(error.code());
  } catch (const std::bad_alloc& error) {
    std::snprintf(text, bytes, "out of memory");
    return static_cast<int>(Errc::kOutOfMemory);
  } catch (const std::exception& error) {
    std::snprintf(text, bytes, "%s", error.what());
  } catch (...) {
    std::snprintf(text, bytes, "an exception of no known kind");
  }
  return static_cast<int>(Errc::kInternal);
}

Worker::Worker(WorkerOptions options) : state_(std::make_unique<State>(std::move(options))) {}
Worker::~Worker() {
  // In a forked child the threads do not exist and the memory is the parent's business.
  if (is_forked()) (void)state_.release();
}

std::size_t Worker::table_bytes(std::uint32_t local_size) noexcept { return ReadyTable::bytes_needed(local_size); }
Errc Worker::submit(const Request& request, std::shared_ptr<Operation>* operation) noexcept {
  return state_->submit(request, operation);
}
bool Worker::poll(Operation& operation) noexcept { return state_->poll(operation); }
bool Worker::take(Operation& operation) noexcept { return state_->take(operation); }
bool Worker::drive(Operation& operation, int timeout_ms) noexcept { return state_->drive(operation, timeout_ms); }
bool Worker::wait(Operation& operation, int timeout_ms) noexcept { return operation.completion.wait(timeout_ms); }
void Worker::hand_over(Operation& operation) noexcept { state_->hand_over(operation); }
void Worker::settle() {
  const State::Inside inside(*state_);
  if (!state_->closing.load(std::memory_order_seq_cst)) state_->settle();
}

std::shared_ptr<Operation> Worker::reap() noexcept {
  std::shared_ptr<Operation> operation = state_->finished.take();
  // What it ended with may not be written yet; that it has failed is.
  if (operation != nullptr && !operation->has_failed()) {
    state_->finished_bytes.fetch_add(operation->bytes(), std::memory_order_relaxed);
  }
  return operation;
}

void* Worker::allocate(std::size_t bytes) noexcept {
  const std::uint64_t offset = state_->arena.allocate(bytes);
  return offset == Arena::kNoSpace ? nullptr : state_->arena.at(offset);
}
void Worker::free(void* memory) noexcept {
  const std::byte* base = state_->arena_segments[state_->options.local_rank].data();
  (void)state_->arena.free(static_cast<std::uint64_t>(static_cast<std::byte*>(memory) - base));
}
std::size_t Worker::allocated_bytes() const noexcept { return state_->arena.allocated_bytes(); }

void Worker::abort(std::uint32_t member, int cause) noexcept {
  state_->table.abort(member, static_cast<Cause>(cause));
  state_->network.wake();
}
bool Worker::aborted() const noexcept { return state_->table.aborted(); }
std::uint32_t Worker::aborted_member() const noexcept { return state_->table.aborted_member(); }
int Worker::aborted_cause() const noexcept { return static_cast<int>(state_->table.aborted_cause()); }
void Worker::shutdown(int timeout_ms) noexcept { state_->shutdown(timeout_ms); }
bool Worker::is_forked() const noexcept { return state_->is_forked; }
bool Worker::take_log(LogRecord* record) noexcept { return state_->log.take(record); }
int Worker::disagreement_descriptor() const noexcept { return state_->finished.disagreement_event.descriptor(); }
void Worker::take_disagreements(std::vector<Disagreement>* out) noexcept {
  (void)state_->finished.disagreement_event.drain();
  state_->finished.disagreements.drain(out);
}
void Worker::waiting(std::int64_t older_than_ms, std::size_t limit, std::vector<TaskTable::Waiting>* out) const {
  state_->tasks.waiting(now_ms() - older_than_ms, limit, out);
}
std::uint64_t Worker::owner_received_bytes() const noexcept { return state_->network.engine_counters().received_bytes; }
std::uint64_t Worker::owner_sent_bytes() const noexcept { return state_->network.engine_counters().sent_bytes; }
std::uint64_t Worker::finished_bytes() const noexcept { return state_->finished_bytes.load(std::memory_order_relaxed); }
int Worker::step_local() { return state_->local_runner.step(); }
int Worker::step_network() { return state_->network_runner.step(); }
bool Worker::is_readable_by_others() const noexcept {
  return state_->table.status(state_->options.local_rank).reachable_by.load(std::memory_order_relaxed) + 1 ==
         state_->options.local_size;
}

}  // namespace commlib
