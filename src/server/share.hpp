// SPDX-License-Identifier: Apache-2.0
// What an owner knows of one partition in one round, and what a frame about it must look like.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/errc.hpp"
#include "base/frame.hpp"
#include "memory/buffer_view.hpp"
#include "sched/placement.hpp"
#include "server/slot_pool.hpp"

namespace commlib {

enum class SharePhase : std::uint8_t {
  kGathering,   // not all hosts have announced it
  kWaiting,     // all have; waits for budget
  kCollecting,  // granted; waits for pieces
  kDraining,    // every piece is answered, or the share has failed; waits until frames in flight let go of its slots
};

enum class Announced : std::uint8_t { kNothing, kReady, kEager };

struct Share;

// What one host has contributed to one piece.
struct Contribution {
  const std::byte* data = nullptr;  // null for no bytes
  Slot slot;                        // where they lie; empty for the own host's, which stay where they are
  bool arrived = false;
  bool unsent = false;  // the RESULT for this host is still on its way out
};

struct SharePiece {
  Share* share = nullptr;
  std::uint64_t first_element = 0;
  std::uint32_t count = 0;
  std::uint32_t missing = 0;   // contributions that have not arrived
  std::uint32_t unsent = 0;    // RESULTs on their way out
  std::byte* total = nullptr;  // kAccumulate: its part of the key's total
  Slot result;                 // what they point to; empty if that is the own host's memory
};

struct ShareHost {
  Announced announced = Announced::kNothing;
  std::uint32_t eager_bytes = 0;  // charged to the host's eager budget
};

struct KeyState;

struct Share {
  KeyState* key_state = nullptr;
  SharePhase phase = SharePhase::kGathering;
  Frame terms;            // the first announcement; the others must say the same
  bool disagree = false;  // they do not
  bool failed = false;
  bool fail_contributor_late = false;  // its FAIL waits until its bytes are no longer in use
  Errc fail_code = Errc::kOk;          // what FAIL says
  std::uint32_t fail_member = 0;
  std::int32_t priority = INT32_MIN;  // the highest of all hosts
  std::uint32_t announced = 0;        // hosts that have
  std::uint32_t open_pieces = 0;      // not yet answered
  std::uint32_t unsent = 0;           // RESULTs on their way out, over all pieces
  std::uint64_t reserved_bytes = 0;   // of the budget, taken or waited for
  std::uint64_t line = 0;             // place of the partition's first byte in the egress, if it was granted bytes
  std::size_t live_index = 0;         // its place among the engine's shares
  std::vector<ShareHost> hosts;
  std::vector<SharePiece> pieces;           // mine, in order; known once all hosts agree, and never moved then
  std::vector<Contribution> contributions;  // [piece × hosts + host]; before: [host], for EAGER
};

// What is wrong with a READY or EAGER taken by itself, as text; nullptr if it makes sense.
[[nodiscard]] const char* fault_of_announcement(const Frame& frame, std::uint32_t hosts,
                                                std::uint64_t partition_bytes) noexcept;

// The functions below are about announcements without fault.

// Whether two hosts mean the same operation.
[[nodiscard]] bool is_same_operation(const Frame& a, const Frame& b) noexcept;
// How many hosts announce it; whether `host` pushes; whether it is answered with the bytes of the result.
[[nodiscard]] std::uint32_t announcers(const Frame& terms, std::uint32_t hosts) noexcept;
[[nodiscard]] bool contributes(const Frame& terms, PeerId host) noexcept;
[[nodiscard]] bool is_answered(const Frame& terms, PeerId host) noexcept;
// How much `host` sends with an EAGER.
[[nodiscard]] std::uint64_t eager_bytes(const Frame& terms, PeerId host) noexcept;
// Bytes of an element as it is pushed, and as it comes back.
[[nodiscard]] std::size_t push_item_bytes(const Frame& terms) noexcept;
[[nodiscard]] std::size_t result_item_bytes(const Frame& terms) noexcept;
[[nodiscard]] bool owns_a_piece(const Placement& placement, PeerId owner, const Frame& terms) noexcept;

}  // namespace commlib
