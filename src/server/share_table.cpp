// SPDX-License-Identifier: Apache-2.0
#include "server/share_table.hpp"

#include <algorithm>
#include <utility>

namespace commlib {

Share* KeyState::find(std::uint64_t round) const noexcept {
  for (Share* share : shares) {
    if (share->terms.round == round) return share;
  }
  return nullptr;
}

bool KeyState::is_over(std::uint64_t round) const noexcept {
  if (round <= heard_round) return true;
  return std::any_of(shares.begin(), shares.end(), [round](const Share* share) { return share->terms.round > round; });
}

KeyState& ShareTable::key_state(std::uint64_t key, Collective collective, PeerId from) {
  return keys_[lane(collective, from)][key];
}

const KeyState* ShareTable::find_key(std::uint64_t key, Collective collective, PeerId from) const noexcept {
  const auto& keys = keys_[lane(collective, from)];
  const auto found = keys.find(key);
  return found == keys.end() ? nullptr : &found->second;
}

Share& ShareTable::make(KeyState& state, const Frame& terms) {
  state.shares.reserve(state.shares.size() + 1);
  if (live_.size() == live_.capacity()) live_.reserve(std::max<std::size_t>(64, 2 * live_.capacity()));
  spare_.reserve(live_.capacity());  // so that retire() cannot fail
  if (spare_.empty()) spare_.push_back(std::make_unique<Share>());
  Share& share = *spare_.back();
  share.hosts.resize(hosts_);
  share.contributions.resize(hosts_);

  share.key_state = &state;
  share.terms = terms;
  share.live_index = live_.size();
  state.shares.push_back(&share);
  live_.push_back(std::move(spare_.back()));
  spare_.pop_back();
  return share;
}

void ShareTable::hide(Share& share) noexcept {
  std::erase(share.key_state->shares, &share);
  share.phase = SharePhase::kDraining;
}

void ShareTable::retire(Share& share) noexcept {
  hide(share);
  std::unique_ptr<Share> ended = std::move(live_[share.live_index]);
  if (ended->live_index + 1 != live_.size()) {
    live_[ended->live_index] = std::move(live_.back());
    live_[ended->live_index]->live_index = ended->live_index;
  }
  live_.pop_back();

  // As new, but with the memory of its vectors.
  Share fresh;
  fresh.hosts.swap(ended->hosts);
  fresh.pieces.swap(ended->pieces);
  fresh.contributions.swap(ended->contributions);
  fresh.hosts.clear();
  fresh.pieces.clear();
  fresh.contributions.clear();
  *ended = std::move(fresh);
  spare_.push_back(std::move(ended));
}

}  // namespace commlib
