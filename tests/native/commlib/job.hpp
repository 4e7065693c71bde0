// SPDX-License-Identifier: Apache-2.0
// A whole job inside one process: workers and servers as the control plane would wire them, with real shared memory and
// real sockets. "Hosts" are groups of workers that share a ready table and arenas.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/errc.hpp"
#include "base/fd.hpp"
#include "commlib/commlib.hpp"
#include "memory/segment.hpp"
#include "sched/partition.hpp"

namespace commlib::test {

struct JobOptions {
  std::vector<std::uint32_t> ranks_per_host = {2};
  std::uint32_t servers = 0;
  std::uint32_t streams = 1;
  std::uint64_t partition_bytes = 4 << 20;
  std::uint64_t credit_bytes = 16 << 20;
  LocalRoute route = LocalRoute::kAuto;
  std::uint64_t arena_bytes = 1u << 30;
  bool threads = true;
  bool last_host_is_raw = false;  // the last host has no workers; the test speaks for it, through raw()
};

class Job {
 public:
  explicit Job(const JobOptions& options) : options_(options) {
    const auto hosts = static_cast<std::uint32_t>(options.ranks_per_host.size());
    const std::uint32_t nodes = hosts + options.servers;
    std::vector<std::uint32_t> node_of_rank;
    std::vector<std::uint32_t> roots;
    for (std::uint32_t host = 0; host < hosts; ++host) {
      roots.push_back(static_cast<std::uint32_t>(node_of_rank.size()));
      node_of_rank.insert(node_of_rank.end(), options.ranks_per_host[host], host);
    }
    std::vector<std::vector<std::vector<int>>> streams(nodes, std::vector<std::vector<int>>(hosts > 1 ? nodes : 0));
    for (std::uint32_t a = 0; hosts > 1 && a < hosts; ++a) {
      for (std::uint32_t b = a + 1; b < nodes; ++b) {
        for (std::uint32_t stream = 0; stream < options.streams; ++stream) {
          int pair[2];
          if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) throw_os_error("socketpair", errno);
          streams[a][b].push_back(pair[0]);
          streams[b][a].push_back(pair[1]);
        }
      }
    }
    std::uint32_t rank = 0;
    if (options.last_host_is_raw) {
      for (const auto& sockets : streams[hosts - 1]) {
        raw_.emplace_back();
        for (const int socket : sockets) raw_.back().emplace_back(socket);
      }
    }
    for (std::uint32_t host = 0; host < hosts - (options.last_host_is_raw ? 1 : 0); ++host) {
      const std::uint32_t local_size = options.ranks_per_host[host];
      segments_.push_back(Segment::create(Worker::table_bytes(local_size)));
      const int table_fd = segments_.back().descriptor();
      std::vector<int> arena_fds;
      for (std::uint32_t i = 0; i < local_size; ++i) {
        segments_.push_back(Segment::create(options.arena_bytes));
        arena_fds.push_back(segments_.back().descriptor());
      }
      for (std::uint32_t i = 0; i < local_size; ++i, ++rank) {
        WorkerOptions worker;
        worker.rank = rank;
        worker.size = static_cast<std::uint32_t>(node_of_rank.size());
        worker.local_rank = i;
        worker.local_size = local_size;
        worker.node = host;
        worker.nodes = hosts;
        worker.servers = options.servers;
        worker.node_of_rank = node_of_rank;
        for (std::uint32_t j = 0; j < local_size; ++j) worker.local_ranks.push_back(rank - i + j);
        worker.roots = roots;
        worker.ranks_per_host = options.ranks_per_host;
        worker.table_fd = table_fd;
        worker.arena_fds = arena_fds;
        worker.arena_bytes.assign(local_size, options.arena_bytes);
        worker.local_pids.assign(local_size, ::getpid());
        if (i == 0) worker.streams = streams[host];
        worker.partition_bytes = options.partition_bytes;
        worker.credit_bytes = options.credit_bytes;
        worker.route = options.route;
        worker.threads = options.threads;
        workers_.push_back(std::make_unique<Worker>(worker));
      }
    }
    for (std::uint32_t index = 0; hosts > 1 && index < options.servers; ++index) {
      ServerOptions server;
      server.index = index;
      server.nodes = hosts;
      server.servers = options.servers;
      server.roots = roots;
      server.ranks_per_host = options.ranks_per_host;
      server.streams = streams[hosts + index];
      server.partition_bytes = options.partition_bytes;
      server.credit_bytes = options.credit_bytes;
      server.threads = options.threads;
      servers_.push_back(std::make_unique<Server>(server));
    }
  }

  // In the order a real job ends: each worker leaves while the others still run, then the servers go.
  ~Job() {
    for (auto& worker : workers_) worker->shutdown(2'000);
    for (auto& server : servers_) server->stop(2'000);
  }

  // Threads off: every loop of the job, to be stepped by hand.
  [[nodiscard]] std::vector<std::function<int()>> loops() {
    std::vector<std::function<int()>> loops;
    for (auto& worker : workers_) {
      loops.emplace_back([&worker] { return worker->step_local(); });
      loops.emplace_back([&worker] { return worker->step_network(); });
    }
    for (auto& server : servers_) loops.emplace_back([&server] { return server->step(); });
    return loops;
  }

  [[nodiscard]] std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(workers_.size()); }
  [[nodiscard]] Worker& worker(std::uint32_t rank) const noexcept { return *workers_[rank]; }
  [[nodiscard]] Server& server(std::uint32_t index) const noexcept { return *servers_[index]; }
  // The sockets of the last host where it is raw, by peer and stream.
  [[nodiscard]] std::vector<std::vector<Fd>>& raw() noexcept { return raw_; }

  // What the scheduler would answer: each declaration gets rows and bytes of its own.
  struct Name {
    std::string name;
    std::uint64_t key;
    std::uint64_t cursor;
    RowIndex first_row;
    std::uint32_t rows;
  };
  [[nodiscard]] Name declare(const std::string& name, std::uint64_t bytes) {
    const std::uint32_t rows = part_count(bytes, options_.partition_bytes);
    Name declared{name, next_key_++, next_cursor_, next_row_, rows};
    next_cursor_ += (bytes + 63) / 64 * 64 + (bytes == 0 ? 64 : 0);
    next_row_ += rows;
    return declared;
  }
  [[nodiscard]] static std::shared_ptr<KeyRecord> record(const Name& name) {
    auto key = std::make_shared<KeyRecord>();
    key->name = name.name;
    key->declared_key = name.key;
    key->cursor = name.cursor;
    key->extents = {{name.first_row, name.rows}};
    return key;
  }

 private:
  JobOptions options_;
  std::vector<Segment> segments_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<std::unique_ptr<Server>> servers_;
  std::vector<std::vector<Fd>> raw_;
  std::uint64_t next_key_ = 1;
  std::uint64_t next_cursor_ = 0;
  RowIndex next_row_ = 0;
};

// Wait for an operation as the binding does, whoever carries it out; true if it is done.
[[nodiscard]] inline bool carry_out(Worker& worker, Operation& operation, int timeout_ms) {
  if (worker.poll(operation)) return true;
  if (!operation.is_callers && !worker.take(operation)) return worker.wait(operation, timeout_ms);
  if (worker.drive(operation, timeout_ms)) return true;
  worker.hand_over(operation);
  return false;
}

}  // namespace commlib::test
