// SPDX-License-Identifier: Apache-2.0
#include "transport/send_bound.hpp"

#include <linux/tcp.h>  // not <netinet/tcp.h>, whose tcp_info ends before what is needed here
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstddef>

#include "base/clock.hpp"

namespace commlib {

namespace {

constexpr std::int64_t kLookMs = 20;
constexpr std::int64_t kRecentMs = 200;
constexpr std::uint64_t kSpareUs = 2'000;  // how long the link is kept busy while our thread does not run
constexpr std::uint64_t kLeastBytes = 64 * 1024;
constexpr std::uint64_t kMostBytes = 256 * 1024;  // a stream that needs more is fast: its queue is short as it is
#if !defined(SO_BUF_LOCK)
#define SO_BUF_LOCK 72
#endif
constexpr int kUnbounded = 1 << 30;  // cut down to net.core.wmem_max by the kernel

}  // namespace

std::uint32_t SendBound::bytes_for(std::uint64_t bytes_per_s, std::uint32_t round_trip_us) noexcept {
  if (round_trip_us > kSpareUs) return 0;
  const std::uint64_t per_ms = bytes_per_s / 1'000;
  const std::uint64_t bytes = per_ms * (round_trip_us + kSpareUs) / 1'000;
  return bytes > kMostBytes ? 0 : static_cast<std::uint32_t>(std::max(bytes, kLeastBytes));
}

void SendBound::on_full(int socket) noexcept {
  const std::int64_t now = now_ms();
  const std::int64_t passed_ms = now - looked_ms_;
  if (now < asked_ms_ || now - asked_ms_ < kLookMs) return;
  asked_ms_ = now;
  tcp_info info;
  socklen_t length = sizeof info;
  if (::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &length) != 0 ||
      length < offsetof(tcp_info, tcpi_rwnd_limited)) {
    asked_ms_ = INT64_MAX;  // no TCP, or a kernel that does not say: never again
    return;
  }
  // What was long ago, and small frames meanwhile, tell nothing of how fast it is now.
  const bool is_recent = passed_ms < kRecentMs;
  const std::uint64_t busy_us = info.tcpi_busy_time - busy_us_;
  if (is_recent && busy_us < kLookMs * 1'000) return;  // too short to tell a rate
  const std::uint64_t acked_bytes = info.tcpi_bytes_acked - acked_bytes_;
  looked_ms_ = now;
  busy_us_ = info.tcpi_busy_time;
  acked_bytes_ = info.tcpi_bytes_acked;
  // The kernel forgets the least one after some minutes, and then takes our own queue for a part of the way.
  round_trip_us_ = std::min(round_trip_us_, info.tcpi_min_rtt);
  if (!is_recent) return;
  const std::uint64_t rate = acked_bytes * 1'000'000 / busy_us;
  const std::uint32_t wanted = bytes_for(rate, round_trip_us_);
  // Set again only where it makes a difference: rates are measured, and so vary.
  if (wanted == bound_ || (wanted > 0 && bound_ > 0 && wanted > bound_ - bound_ / 4 && wanted < bound_ + bound_ / 4))
    return;
  const int bytes = wanted > 0 ? static_cast<int>(wanted / 2) : kUnbounded;  // which the kernel doubles
  if (::setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes) != 0) return;
  bound_ = wanted;
  // Let the kernel choose again, where it can be told so (Linux 5.15).
  const std::uint32_t nothing = 0;
  if (wanted == 0) (void)::setsockopt(socket, SOL_SOCKET, SO_BUF_LOCK, &nothing, sizeof nothing);
}

}  // namespace commlib
