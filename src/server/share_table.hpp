// SPDX-License-Identifier: Apache-2.0
// All shares of an engine: found by key and round while they can still change, and listed until nothing refers to them.
//
// Owned by one loop and used on its thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "server/share.hpp"

namespace commlib {

// What is remembered of a key for ever; of one that hosts accumulate under, by each for itself.
struct KeyState {
  std::uint64_t heard_round = 0;   // the latest that all hosts have announced here
  std::uint64_t failed_round = 0;  // the latest that failed here after a GRANT; PUSHes for it may still arrive
  std::vector<Share*> shares;      // all but the draining ones; rarely more than two

  [[nodiscard]] Share* find(std::uint64_t round) const noexcept;
  // Whether a host that has not announced `round` yet comes too late: another one is further, or all are.
  [[nodiscard]] bool is_over(std::uint64_t round) const noexcept;
};

class ShareTable {
 public:
  explicit ShareTable(std::uint32_t hosts) : hosts_(hosts), keys_(hosts + 1) {}

  // `from` announces or pushes something of that key: one that all hosts take part in, or one of its own.
  [[nodiscard]] KeyState& key_state(std::uint64_t key, Collective collective, PeerId from);
  [[nodiscard]] const KeyState* find_key(std::uint64_t key, Collective collective, PeerId from) const noexcept;

  // A share that nobody has announced yet, about the key, round and operation of `terms`. Throws std::bad_alloc, with
  // nothing changed. Used again and again: in the long run this allocates nothing.
  [[nodiscard]] Share& make(KeyState& state, const Frame& terms);

  // It is not found by key and round any more, and drains. May be repeated.
  static void hide(Share& share) noexcept;

  // Nothing refers to it any more. Gives its slots back.
  void retire(Share& share) noexcept;

  // The i-th of all shares, in no order. Retiring one moves the last into its place, so whoever walks the list and may
  // retire the share it looks at walks backwards.
  [[nodiscard]] Share& at(std::size_t i) const noexcept { return *live_[i]; }
  [[nodiscard]] std::size_t size() const noexcept { return live_.size(); }
  [[nodiscard]] std::size_t keys() const noexcept { return keys_.back().size(); }  // that all take part in

 private:
  [[nodiscard]] std::size_t lane(Collective collective, PeerId from) const noexcept {
    return collective == Collective::kAccumulate ? from : hosts_;
  }

  std::uint32_t hosts_;
  std::vector<std::unordered_map<std::uint64_t, KeyState>> keys_;  // by host: its own; the last: all hosts'
  std::vector<std::unique_ptr<Share>> live_;
  std::vector<std::unique_ptr<Share>> spare_;  // to be used again: their vectors keep their capacity
};

}  // namespace commlib
