// SPDX-License-Identifier: Apache-2.0
// All hosts of a job in one process and on one thread, for tests: the contract of transport.hpp without an operating
// system, and without chance unless a seed asks for it.
//
//     LoopbackHub hub(3);
//     hub.endpoint(0).attach(&sink0); …
//     hub.endpoint(0).notify(2);
//     hub.run_until_quiet();
//
// A frame is taken by next_frame in a do_work of its sender, copied from the sender's memory into the receiver's in a
// do_work of the receiver, and reported by on_sent in the sender's next do_work.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "transport/transport.hpp"

namespace commlib {

struct LoopbackOptions {
  std::uint32_t streams = 1;  // between two endpoints
  std::uint32_t window = 4;   // frames on their way in one stream at most: what a socket's buffer is to TCP

  // 0: in order. Else a source of trouble, always the same for the same seed: streams are served in any order, a frame
  // is up to `max_delay` do_works of its receiver late, and other streams move between a header and its payload.
  std::uint64_t seed = 0;
  std::uint32_t max_delay = 3;
};

class LoopbackHub {
 public:
  explicit LoopbackHub(PeerId endpoints, LoopbackOptions options = {});
  ~LoopbackHub();
  LoopbackHub(const LoopbackHub&) = delete;
  LoopbackHub& operator=(const LoopbackHub&) = delete;

  // Lives as long as the hub. endpoint(i).close() without finish() is the death of i: what it had on its way is lost,
  // and every other endpoint sees kPeerLost.
  [[nodiscard]] Transport& endpoint(PeerId id) noexcept;

  // One do_work of every endpoint, lowest first; returns the sum.
  int step() noexcept;

  // step(), and `others` (the loops that feed the sinks: returns how much it did), until nothing moves and nothing is
  // on its way. False: still not quiet after `max_steps`.
  [[nodiscard]] bool run_until_quiet(const std::function<int()>& others = nullptr, int max_steps = 1'000'000);

  // Nothing is on its way, except to or from paused endpoints.
  [[nodiscard]] bool is_quiet() const noexcept;

  // A paused endpoint's do_work does nothing, as if its process were stopped.
  void pause(PeerId id, bool paused) noexcept;

  // The hub's clock, that silent_ms reads; it stands still otherwise.
  void advance_ms(std::int64_t ms) noexcept { now_ms_ += ms; }

 private:
  class Endpoint;
  struct Lane;

  [[nodiscard]] Lane& lane(PeerId from, PeerId to, std::uint32_t stream) const noexcept;
  [[nodiscard]] std::uint32_t random_below(std::uint32_t bound) noexcept;  // 0 without a seed

  const LoopbackOptions options_;
  std::mt19937_64 random_;
  std::int64_t now_ms_ = 0;
  std::vector<std::unique_ptr<Endpoint>> endpoints_;
  std::vector<std::unique_ptr<Lane>> lanes_;
};

}  // namespace commlib
