// SPDX-License-Identifier: Apache-2.0
// The façade: all that the binding sees of the core. A Worker owns everything a training process has; a Server is a
// dedicated summation server. Neither knows Python, and both are given descriptors that are connected already.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/log.hpp"
#include "sched/task.hpp"

namespace commlib {

// Which way ordinary buffers (not in an arena) take on one host.
enum class LocalRoute : std::uint8_t {
  kAuto = 0,
  kArena = 1,   // none: they are refused, so that nothing is copied unnoticed
  kCma = 2,     // read by the others through the kernel (process_vm_readv)
  kStaged = 3,  // copied through an arena
};

struct WorkerOptions {
  std::uint32_t rank = 0;
  std::uint32_t size = 1;
  std::uint32_t local_rank = 0;
  std::uint32_t local_size = 1;
  std::uint32_t node = 0;
  std::uint32_t nodes = 1;
  std::uint32_t servers = 0;
  std::vector<std::uint32_t> node_of_rank;    // by global rank
  std::vector<std::uint32_t> local_ranks;     // global rank by local rank, of this host
  std::vector<std::uint32_t> roots;           // global rank of the local root, by node
  std::vector<std::uint32_t> ranks_per_host;  // by node
  int table_fd = -1;                          // borrowed
  std::vector<int> arena_fds;                 // by local rank, borrowed
  std::vector<std::uint64_t> arena_bytes;     // by local rank
  std::vector<int> local_pids;                // by local rank
  std::vector<int> local_sockets;             // by local rank, −1 where there is none; taken
  std::vector<std::vector<int>> streams;      // by peer; taken. Empty but at local roots of several hosts
  std::uint64_t partition_bytes = 1 << 20;
  std::uint64_t credit_bytes = 8 << 20;  // slots an owner may have granted at once; less for who owns less than others
  std::int64_t peer_timeout_ms = 30'000;
  LocalRoute route = LocalRoute::kAuto;
  int log_level = 30;
  bool threads = true;  // false: nothing runs but in step_local and step_network, for tests
};

// Who carries an operation out.
enum class Driver : std::uint8_t {
  kLoop,    // the local loop
  kCaller,  // the calling thread, which calls `drive` at once; where it can, else the loop (see Operation::is_callers)
  kLater,   // what is small, whoever calls `poll` or `take` one day; else the loop
};

struct Request {
  std::shared_ptr<KeyRecord> key;  // taken (KeyRecord::try_take) by the caller
  std::uint64_t hash = 0;
  Collective collective = Collective::kReduce;
  ReduceOp op = ReduceOp::kSum;  // kSum for all but kReduce
  DType dtype = DType::kFloat32;
  std::uint32_t root = 0;
  std::int32_t priority = 0;
  const void* input = nullptr;
  void* output = nullptr;  // the input's address, or overlapping it nowhere
  std::uint64_t count = 0;
  void* custody = nullptr;  // given back by reap()
  Driver driver = Driver::kLoop;
};

// For an `except +` translator: the code of the exception being handled (kInternal for any but Error) and its text.
[[nodiscard]] int current_exception(char* text, std::size_t bytes) noexcept;

class Worker {
 public:
  explicit Worker(WorkerOptions options);  // throws Error; `options`' sockets are taken also then
  ~Worker();                               // shutdown(0)
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  [[nodiscard]] static std::size_t table_bytes(std::uint32_t local_size) noexcept;

  // Any thread. kOk: `*operation` is in flight, its custody held until reaped; its name is free again when it completes.
  // kPeerLost, kShutDown, kUnsupported, kNotInitialized (in a forked child), kInternal (the key has too few rows),
  // kOutOfMemory: nothing has happened, and the key is still taken.
  [[nodiscard]] Errc submit(const Request& request, std::shared_ptr<Operation>* operation) noexcept;
  // Is it done? Looks, if it is one that is looked at later and nobody else is looking.
  [[nodiscard]] bool poll(Operation& operation) noexcept;
  // Of one that is looked at later: true if the calling thread is from now on the one that carries it out, by `drive`
  // alone, until it is done or handed over. The first to ask is.
  [[nodiscard]] bool take(Operation& operation) noexcept;
  // Carry it out and wait, at most `timeout_ms` (−1: for ever); true if it is done. Only by its driver.
  bool drive(Operation& operation, int timeout_ms) noexcept;
  // Wait at most `timeout_ms` for it to be carried out by another thread; true if it is done.
  bool wait(Operation& operation, int timeout_ms) noexcept;
  // From here on the local loop carries it out. Only by its driver.
  void hand_over(Operation& operation) noexcept;
  // What is to be looked at later is not looked at: all such operations go to the local loop.
  void settle();
  // A finished operation whose custody is to be given back; nullptr if there is none.
  [[nodiscard]] std::shared_ptr<Operation> reap() noexcept;

  // 64-byte aligned memory of the own arena; nullptr if it is full. Any thread.
  [[nodiscard]] void* allocate(std::size_t bytes) noexcept;
  void free(void* memory) noexcept;
  [[nodiscard]] std::size_t allocated_bytes() const noexcept;

  // The job has failed, says somebody outside the core.
  void abort(std::uint32_t member, int cause) noexcept;
  [[nodiscard]] bool aborted() const noexcept;
  [[nodiscard]] std::uint32_t aborted_member() const noexcept;
  [[nodiscard]] int aborted_cause() const noexcept;

  // Leave in order. Operations in flight are broken off, with kShutDown or kPeerLost, and end the job for all. Waits at most
  // `timeout_ms` for what is still on its way to others. May be repeated. Not in a forked child, where it does nothing.
  void shutdown(int timeout_ms) noexcept;
  [[nodiscard]] bool is_forked() const noexcept;  // this is a child of the process that made the worker

  [[nodiscard]] bool take_log(LogRecord* record) noexcept;
  // Readable when take_disagreements has something.
  [[nodiscard]] int disagreement_descriptor() const noexcept;
  void take_disagreements(std::vector<Disagreement>* out) noexcept;
  void waiting(std::int64_t older_than_ms, std::size_t limit, std::vector<TaskTable::Waiting>* out) const;
  // Bytes this process has received from, and sent to, other nodes as an owner. After shutdown.
  [[nodiscard]] std::uint64_t owner_received_bytes() const noexcept;
  [[nodiscard]] std::uint64_t owner_sent_bytes() const noexcept;
  // Bytes of operations finished with success, by this process.
  [[nodiscard]] std::uint64_t finished_bytes() const noexcept;
  // With threads off: one turn of a loop by hand; returns what do_work returns.
  int step_local();
  int step_network();
  // Can the other ranks of this host read this one's ordinary memory?
  [[nodiscard]] bool is_readable_by_others() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

struct ServerOptions {
  std::uint32_t index = 0;
  std::uint32_t nodes = 0;
  std::uint32_t servers = 0;
  std::vector<std::uint32_t> roots;
  std::vector<std::uint32_t> ranks_per_host;
  std::vector<std::vector<int>> streams;  // by peer; taken
  std::uint64_t partition_bytes = 1 << 20;
  std::uint64_t credit_bytes = 8 << 20;
  std::int64_t peer_timeout_ms = 30'000;
  int log_level = 30;
  bool threads = true;  // false: nothing runs but in step, for tests
};

class Server {
 public:
  explicit Server(ServerOptions options);  // throws Error; starts to serve
  ~Server();                               // stop(0)
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Says good-bye to the hosts and ends; waits at most `timeout_ms` for what is on its way.
  void stop(int timeout_ms) noexcept;
  int step();  // with threads off
  [[nodiscard]] bool aborted() const noexcept;
  [[nodiscard]] std::uint32_t aborted_member() const noexcept;
  [[nodiscard]] int aborted_cause() const noexcept;
  void abort(std::uint32_t member, int cause) noexcept;
  [[nodiscard]] bool take_log(LogRecord* record) noexcept;
  [[nodiscard]] std::uint64_t received_bytes() const noexcept;  // after stop
  [[nodiscard]] std::uint64_t sent_bytes() const noexcept;      // after stop

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace commlib
