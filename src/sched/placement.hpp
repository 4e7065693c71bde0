// SPDX-License-Identifier: Apache-2.0
// Which owner sums which bytes. Pure functions of the topology and of virtual addresses: every process computes the
// same answer and nobody is asked.
//
// Let n hosts and k dedicated servers have links of equal bandwidth. An all-reduce takes the least time when each
// colocated engine owns (n−k) / (n²+kn−2k) of the bytes and each dedicated server 2(n−1) / (n²+kn−2k): then every link
// is equally busy in both directions. From k = n on the colocated engines own nothing. The owners take turns in a fixed
// sequence that spreads each of them as evenly as its weight allows, so that even a single tensor is shared out nearly
// so.
#pragma once

#include <cstdint>
#include <vector>

#include "base/frame.hpp"
#include "memory/buffer_view.hpp"

namespace commlib {

class Placement {
 public:
  // `hosts` ≥ 1, else throws Error(kConfig). With one host everything is local: owner 0, whatever `servers` is.
  Placement(std::uint32_t hosts, std::uint32_t servers);

  // Owner of the granule (64 KiB) that holds virtual byte `virtual_byte`.
  [[nodiscard]] PeerId owner_at(std::uint64_t virtual_byte) const noexcept;

  // `bytes` for the owner that receives the most, and less for others as they receive less.
  [[nodiscard]] std::uint64_t in_proportion(PeerId owner, std::uint64_t bytes) const noexcept;

  // One turn of the owners.
  [[nodiscard]] const std::vector<PeerId>& sequence() const noexcept { return sequence_; }

 private:
  std::uint32_t hosts_;
  std::vector<PeerId> sequence_;
};

// What travels in one PUSH and comes back in one RESULT.
struct Piece {
  std::uint64_t first_element = 0;  // within the partition
  std::uint32_t count = 0;          // elements
  PeerId owner = 0;

  friend bool operator==(const Piece&, const Piece&) = default;
};

// Cuts a partition of `count` elements that starts at virtual byte `start_byte` (a multiple of 64, so that no element
// straddles) into pieces, in order, one for each granule it touches. Every partition has at least one piece: an empty
// one has one of 0 elements. `whole`: one piece, owned by the owner of its first byte. Replaces the contents of `out`.
void cut(const Placement& placement, std::uint64_t start_byte, std::uint64_t count, DType dtype, bool whole,
         std::vector<Piece>* out);

}  // namespace commlib
