// SPDX-License-Identifier: Apache-2.0
#include "base/runner.hpp"
#include "commlib/commlib.hpp"
#include "commlib/fork_guard.hpp"
#include "commlib/network_loop.hpp"
#include "sched/partition.hpp"
#include "sched/wire.hpp"
#include "transport/tcp.hpp"

namespace commlib {

namespace {
constexpr std::uint64_t kEagerBudgetBytes = 4 << 20;  // per pair of nodes, as in worker.cpp
}  // namespace

struct Server::State : private ForkGuard::Member {
  explicit State(ServerOptions given)
      : options(std::move(given)),
        log(static_cast<LogLevel>(options.log_level)),
        table_segment(Segment::create(ReadyTable::bytes_needed(1))),
        table(table_segment, 0, 1),
        egress(options.nodes + options.servers),
        engine({options.nodes + options.index, options.nodes, options.servers, options.ranks_per_host,
                enough_credit(options.credit_bytes, options.nodes), kEagerBudgetBytes, options.partition_bytes},
               egress, &log),
        network({options.nodes + options.index, members(), options.peer_timeout_ms}, table, nullptr, &log),
        runner("cl-net", network, [this](const char* what) {
          COMMLIB_LOG(&log, LogLevel::kError, "the loop of server %u failed: %s", options.index, what);
          table.abort(kServerBit | options.index, Cause::kInternal);
        }) {
    std::vector<std::vector<Fd>> streams(options.streams.size());
    for (std::size_t peer = 0; peer < options.streams.size(); ++peer) {
      for (const int descriptor : options.streams[peer]) streams[peer].emplace_back(descriptor);
    }
    TcpOptions tcp;
    tcp.peer_timeout_ms = 0;  // beats tell who is silent; the kernel would go on counting while we are stopped
    tcp.phase = options.index % options.nodes;
    network.attach(std::make_unique<TcpTransport>(std::move(streams), tcp), egress, engine, nullptr);
    if (options.threads) runner.start();
  }
  ~State() override { stop(0); }

  std::vector<std::uint32_t> members() const {
    std::vector<std::uint32_t> all = options.roots;
    for (std::uint32_t index = 0; index < options.servers; ++index) all.push_back(kServerBit | index);
    return all;
  }

  void stop(int timeout_ms) noexcept {
    if (stopped) return;
    stopped = true;
    network.finish();
    if (options.threads) network.wait_finished(timeout_ms);
    runner.stop();
    network.close();
  }
  void in_forked_child() noexcept override { network.close(); }

  ServerOptions options;
  LogBuffer log;
  Segment table_segment;
  ReadyTable table;  // of a host without ranks: only its epoch word is used
  Egress egress;
  ServerEngine engine;
  NetworkLoop network;
  Runner runner;
  bool stopped = false;
};

Server::Server(ServerOptions options) : state_(std::make_unique<State>(std::move(options))) {}
Server::~Server() = default;
void Server::stop(int timeout_ms) noexcept { state_->stop(timeout_ms); }
int Server::step() { return state_->runner.step(); }
bool Server::aborted() const noexcept { return state_->table.aborted(); }
std::uint32_t Server::aborted_member() const noexcept { return state_->table.aborted_member(); }
int Server::aborted_cause() const noexcept { return static_cast<int>(state_->table.aborted_cause()); }
void Server::abort(std::uint32_t member, int cause) noexcept {
  state_->table.abort(member, static_cast<Cause>(cause));
  state_->network.wake();
}
bool Server::take_log(LogRecord* record) noexcept { return state_->log.take(record); }
std::uint64_t Server::received_bytes() const noexcept { return state_->network.engine_counters().received_bytes; }
std::uint64_t Server::sent_bytes() const noexcept { return state_->network.engine_counters().sent_bytes; }

}  // namespace commlib
