// SPDX-License-Identifier: Apache-2.0
// How many bytes the kernel may hold of one stream.
//
// What the kernel holds has an order already: a late urgent frame waits behind all of it, at every hop. Left alone it
// holds as much as the congestion window, which a slow link lets grow until a queue somewhere is full: at 300 Mbit/s
// ten milliseconds and more. A link needs no more than its rate times the round trip to be full, and what leaves it
// while our thread is not running. So a stream that is seen to be slow is bounded to that (after "Bufferbloat", Gettys
// and Nichols 2011, at the sender's end of it); one that is fast is left to the kernel, and so is one to far away, whose
// round trip is longer than what is added for our thread: bounded too low by mistake, it would never be seen to be faster.
#pragma once

#include <cstdint>

namespace commlib {

class SendBound {
 public:
  // The socket has taken less than it was offered. Cheap; looks at the socket now and then only. What is no TCP, or of
  // a kernel that does not say how fast it was, is left alone.
  void on_full(int socket) noexcept;

  // What a stream of `bytes_per_s` may have in the kernel; 0: as much as the kernel likes.
  [[nodiscard]] static std::uint32_t bytes_for(std::uint64_t bytes_per_s, std::uint32_t round_trip_us) noexcept;

 private:
  std::int64_t asked_ms_ = 0;      // when the kernel was asked last
  std::int64_t looked_ms_ = 0;     // when it had something to tell
  std::uint64_t acked_bytes_ = 0;  // of the look before, as is `busy_us_`
  std::uint64_t busy_us_ = 0;
  std::uint32_t round_trip_us_ = UINT32_MAX;
  std::uint32_t bound_ = 0;  // what was set, 0 while it never was or no longer is
};

}  // namespace commlib
