// SPDX-License-Identifier: Apache-2.0
#include "sched/placement.hpp"

#include <algorithm>
#include <numeric>

#include "base/errc.hpp"
#include "sched/wire.hpp"

namespace commlib {

namespace {

// Owners of equal weight that take turns among themselves.
struct Group {
  PeerId first;
  std::uint64_t members;
  std::uint64_t weight;
  std::uint64_t turns = 0;  // taken by all its members together

  // The smooth weighted round robin adds its weight to every owner's balance at each step, takes the owner with the
  // highest balance (of several, the lowest index), and subtracts the sum of all weights from it. Within a group the
  // next in turn has been taken least often, so its balance is the group's highest.
  [[nodiscard]] std::int64_t balance(std::uint64_t step, std::uint64_t total) const noexcept {
    return static_cast<std::int64_t>(weight * step) - static_cast<std::int64_t>(total * (turns / members));
  }
  [[nodiscard]] PeerId take() noexcept { return first + static_cast<PeerId>(turns++ % members); }
};

}  // namespace

Placement::Placement(std::uint32_t hosts, std::uint32_t servers) : hosts_(hosts) {
  if (hosts == 0) throw Error(Errc::kConfig, "a job needs at least one host");
  if (hosts == 1) {
    sequence_.push_back(0);
    return;
  }
  Group colocated{0, hosts, servers < hosts ? hosts - servers : 0U};
  Group dedicated{hosts, servers, servers <= hosts ? 2 * (std::uint64_t{hosts} - 1) : 1U};
  const std::uint64_t divisor = servers == 0 ? colocated.weight : std::gcd(colocated.weight, dedicated.weight);
  colocated.weight /= divisor;
  dedicated.weight /= divisor;

  const std::uint64_t total = colocated.members * colocated.weight + dedicated.members * dedicated.weight;
  sequence_.reserve(total);
  for (std::uint64_t step = 1; step <= total; ++step) {
    const bool to_colocated = dedicated.members == 0 || (colocated.weight != 0 && colocated.balance(step, total) >=
                                                                                      dedicated.balance(step, total));
    sequence_.push_back((to_colocated ? colocated : dedicated).take());
  }
}

PeerId Placement::owner_at(std::uint64_t virtual_byte) const noexcept {
  return sequence_[virtual_byte / kGranuleBytes % sequence_.size()];
}

std::uint64_t Placement::in_proportion(PeerId owner, std::uint64_t bytes) const noexcept {
  // What all other hosts send it in one turn.
  const auto received_by = [this](PeerId one) {
    const auto turns = static_cast<std::uint64_t>(std::ranges::count(sequence_, one));
    return turns * (one < hosts_ ? std::max(hosts_, 2U) - 1 : hosts_);
  };
  // The last owner has the most, and as much as any of its kind: all hosts are alike, and all servers.
  const std::uint64_t most = received_by(std::ranges::max(sequence_));
  const std::uint64_t mine = received_by(owner);
  return bytes / most * mine + bytes % most * mine / most;
}

void cut(const Placement& placement, std::uint64_t start_byte, std::uint64_t count, DType dtype, bool whole,
         std::vector<Piece>* out) {
  out->clear();
  if (whole || count == 0) {
    out->push_back({0, static_cast<std::uint32_t>(count), placement.owner_at(start_byte)});
    return;
  }
  const std::uint64_t item = item_bytes(dtype);
  std::uint64_t first = 0;
  while (first < count) {
    const std::uint64_t at = start_byte + first * item;
    const std::uint64_t to_boundary = (kGranuleBytes - at % kGranuleBytes) / item;
    const std::uint64_t elements = std::min(count - first, to_boundary);
    out->push_back({first, static_cast<std::uint32_t>(elements), placement.owner_at(at)});
    first += elements;
  }
}

}  // namespace commlib
