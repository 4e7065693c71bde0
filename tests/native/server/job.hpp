// SPDX-License-Identifier: Apache-2.0
// A job in one thread: an engine at every owner, hosts, and wires between them that a test moves one step at a time.
// Frames go through several streams for each pair of nodes, in order within each, in any order between them.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "host.hpp"
#include "sched/egress.hpp"
#include "sched/placement.hpp"
#include "sched/wire.hpp"
#include "server/engine.hpp"

namespace job {

struct JobOptions {
  std::uint32_t servers = 0;
  std::vector<std::uint32_t> ranks_per_host;
  std::uint64_t budget_bytes = 1 << 20;
  std::uint64_t eager_budget_bytes = 256 * 1024;
  std::uint64_t partition_bytes = 256 * 1024;
  std::size_t streams = 2;
};

class Job {
 public:
  Job(JobOptions options, std::uint64_t seed)
      : random(seed),
        hosts(static_cast<std::uint32_t>(options.ranks_per_host.size())),
        placement(hosts, options.servers),
        options_(std::move(options)) {
    const std::uint32_t total = hosts + options_.servers;
    for (PeerId id = 0; id < total; ++id) {
      Node& node = nodes_.emplace_back();
      node.egress = std::make_unique<Egress>(total);
      node.engine = std::make_unique<commlib::ServerEngine>(
          commlib::EngineOptions{id, hosts, options_.servers, options_.ranks_per_host, options_.budget_bytes,
                                 options_.eager_budget_bytes, options_.partition_bytes},
          *node.egress, nullptr);
      if (id < hosts) node.host = std::make_unique<Host>(id, placement, *node.egress, options_.eager_budget_bytes);
      node.to.resize(total);
      for (auto& streams : node.to) streams.resize(options_.streams);
      node.slowness = 1 + random() % 4 * (random() % 4);
    }
    programs.resize(hosts);
  }

  // One random thing that can happen; false if nothing can happen any more.
  bool step() {
    for (int attempt = 0; attempt < 200; ++attempt) {
      const auto id = static_cast<PeerId>(random() % nodes_.size());
      if (random() % nodes_[id].slowness == 0 && try_step(id, random() % 5, random())) return true;
    }
    for (PeerId id = 0; id < nodes_.size(); ++id) {
      for (std::uint64_t kind = 0; kind < 5; ++kind) {
        for (std::uint64_t pick = 0; pick < nodes_.size() * options_.streams; ++pick) {
          if (try_step(id, kind, pick)) return true;
        }
      }
    }
    return false;
  }

  void run() {
    while (step()) {
    }
  }

  // `gone` leaves in order. It has nothing in flight; the others may. Its engine serves on.
  void leave_in_order(PeerId gone, std::uint32_t member) {
    programs[gone].clear();
    for (Node& node : nodes_) node.engine->on_peer_left(gone, member);
  }

  // `gone` is no longer connected. If it has not left before, the job is over and hosts do nothing more.
  void disconnect(PeerId gone, bool is_over) {
    is_over_ = is_over;
    nodes_[gone].is_gone = true;
    for (PeerId id = 0; id < nodes_.size(); ++id) {
      if (id == gone) continue;
      nodes_[id].engine->on_peer_closed(gone);
      nodes_[id].egress->discard(gone);
      for (auto& wires : nodes_[id].to[gone]) wires.clear();
    }
    for (auto& streams : nodes_[gone].to) {
      for (auto& wires : streams) wires.clear();
    }
  }

  [[nodiscard]] Host& host(PeerId id) { return *nodes_[id].host; }
  [[nodiscard]] commlib::ServerEngine& engine(PeerId id) { return *nodes_[id].engine; }
  [[nodiscard]] std::size_t nodes() const { return nodes_.size(); }

  std::mt19937_64 random;
  const std::uint32_t hosts;
  const commlib::Placement placement;
  std::vector<std::deque<Submission>>
      programs;  // what each host submits; one round of a key at a time, else in any order

 private:
  struct Wire {
    OutFrame out;
    Bytes payload;
    bool has_left = false;
    bool has_header = false;
    std::byte* into = nullptr;
  };
  struct Node {
    std::unique_ptr<Egress> egress;
    std::unique_ptr<commlib::ServerEngine> engine;
    std::unique_ptr<Host> host;
    std::vector<std::vector<std::deque<Wire>>> to;  // by peer, by stream
    std::uint64_t slowness = 1;
    bool is_gone = false;
  };

  bool try_step(PeerId id, std::uint64_t kind, std::uint64_t pick) {
    const auto peer = static_cast<PeerId>(pick % nodes_.size());
    const std::size_t stream = pick / nodes_.size() % options_.streams;
    if (nodes_[id].is_gone || nodes_[peer].is_gone) return false;
    switch (kind) {
      case 0:
        return submit(id, pick);
      case 1:
        return peer == id ? deliver_at_home(id) : take(id, peer, stream);
      case 2:
        return leave(id, peer, stream);
      case 3:
        return receive_header(id, peer, stream);
      default:
        return receive(id, peer, stream);
    }
  }

  // One of the first few of the program whose key is free.
  bool submit(PeerId id, std::uint64_t pick) {
    if (id >= hosts || is_over_) return false;
    auto& program = programs[id];
    Host& host = *nodes_[id].host;
    std::vector<std::uint64_t> passed;
    for (std::size_t i = 0; i < program.size() && i < 6; ++i) {
      const std::uint64_t key = program[i].terms.key;
      const bool in_order = std::count(passed.begin(), passed.end(), key) == 0;
      passed.push_back(key);
      if (!in_order || host.is_busy(key) || (pick >> i & 1) != 0) continue;
      Submission submission = std::move(program[i]);
      program.erase(program.begin() + static_cast<std::ptrdiff_t>(i));
      host.submit(std::move(submission), pick % 3 != 0);
      return true;
    }
    return false;
  }

  bool deliver_at_home(PeerId id) {
    Node& node = nodes_[id];
    OutFrame out;
    if (!node.egress->next(id, &out)) return false;
    if (commlib::is_for_owner(out.frame.kind)) {
      REQUIRE(node.engine->on_local(out) == Errc::kOk);
      node.egress->sent(id, out);
      return true;
    }
    if (out.frame.payload_bytes != 0 && !is_over_) {
      std::byte* into = nullptr;
      REQUIRE(node.host->on_header(id, out.frame, &into) == Errc::kOk);
      std::memcpy(into, out.payload, out.frame.payload_bytes);
    }
    if (!is_over_) node.host->on_frame(id, out.frame);
    node.egress->sent(id, out);
    node.engine->on_sent(id, out);
    return true;
  }

  bool take(PeerId id, PeerId peer, std::size_t stream) {
    auto& wires = nodes_[id].to[peer][stream];
    if (wires.size() >= 3 || (!wires.empty() && !wires.back().has_left)) return false;
    Wire wire;
    if (!nodes_[id].egress->next(peer, &wire.out)) return false;
    wires.push_back(std::move(wire));
    return true;
  }

  bool leave(PeerId id, PeerId peer, std::size_t stream) {
    auto& wires = nodes_[id].to[peer][stream];
    if (wires.empty() || wires.back().has_left) return false;
    Wire& wire = wires.back();
    wire.payload.assign(wire.out.payload, wire.out.payload + wire.out.frame.payload_bytes);
    wire.has_left = true;
    nodes_[id].egress->sent(peer, wire.out);
    if (commlib::is_for_owner(wire.out.frame.kind)) {
      if (!is_over_) nodes_[id].host->on_sent(wire.out);
    } else {
      nodes_[id].engine->on_sent(peer, wire.out);
    }
    return true;
  }

  // `id` receives from `peer`. The header may come while the sender is still busy with the payload.
  bool receive_header(PeerId id, PeerId peer, std::size_t stream) {
    auto& wires = nodes_[peer].to[id][stream];
    if (wires.empty() || wires.front().has_header || wires.front().out.frame.payload_bytes == 0) return false;
    Wire& wire = wires.front();
    const Frame& frame = wire.out.frame;
    wire.has_header = true;
    if (commlib::is_for_owner(frame.kind)) {
      REQUIRE(nodes_[id].engine->on_header(peer, frame, &wire.into) == Errc::kOk);
    } else if (!is_over_) {
      REQUIRE(nodes_[id].host->on_header(peer, frame, &wire.into) == Errc::kOk);
    }
    return true;
  }

  bool receive(PeerId id, PeerId peer, std::size_t stream) {
    auto& wires = nodes_[peer].to[id][stream];
    if (wires.empty() || !wires.front().has_left) return false;
    if (!wires.front().has_header && wires.front().out.frame.payload_bytes != 0) return false;
    const Wire wire = std::move(wires.front());
    wires.pop_front();
    if (wire.into != nullptr) std::memcpy(wire.into, wire.payload.data(), wire.payload.size());
    if (commlib::is_for_owner(wire.out.frame.kind)) {
      REQUIRE(nodes_[id].engine->on_frame(peer, wire.out.frame) == Errc::kOk);
    } else if (!is_over_) {
      nodes_[id].host->on_frame(peer, wire.out.frame);
    }
    return true;
  }

  JobOptions options_;
  std::vector<Node> nodes_;
  bool is_over_ = false;
};

}  // namespace job
