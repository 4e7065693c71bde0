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
constexpr std::uint64_t kSpareUs = 2'000;  // how long the link is kept busy while our thread does not run
constexpr std::uint64_t kLeastBytes = 64 * 1024;
constexpr std::uint64_t kMostBytes = 256 * 1024;  // a stream that needs more is fast: its queue is short as it is
constexpr int kUnbounded = 1 << 30;               // cut down to net.core.wmem_max by the kernel

}  // namespace

std::uint32_t SendBound::bytes_for(std::uint64_t bytes_per_s, std::uint32_t round_trip_us) noexcept {
  const std::uint64_t per_ms = bytes_per_s / 1'000;
  const std::uint64_t bytes = per_ms * (round_trip_us + kSpareUs) / 1'000;
  return bytes > kMostBytes ? 0 : static_cast<std::uint32_t>(std::max(bytes, kLeastBytes));
}

void SendBound::on_full(int socket) noexcept {
  const std::int64_t now = now_ms();
  if (now - looked_ms_ < kLookMs) return;
  looked_ms_ = now;
  tcp_info info;
  socklen_t length = sizeof info;
  if (::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &length) != 0 ||
      length < offsetof(tcp_info, tcpi_rwnd_limited))
    return;
  const std::uint64_t busy_us = info.tcpi_busy_time - busy_us_;
  if (busy_us < kLookMs * 1'000) return;  // too short to tell a rate
  const std::uint64_t rate = (info.tcpi_bytes_acked - acked_bytes_) * 1'000'000 / busy_us;
  busy_us_ = info.tcpi_busy_time;
  acked_bytes_ = info.tcpi_bytes_acked;
  const std::uint32_t wanted = bytes_for(rate, info.tcpi_min_rtt);
  // Set again only where it makes a difference: rates are measured, and so vary.
  if (wanted == bound_ || (wanted > 0 && bound_ > 0 && wanted > bound_ - bound_ / 4 && wanted < bound_ + bound_ / 4))
    return;
  const int bytes = wanted > 0 ? static_cast<int>(wanted / 2) : kUnbounded;  // which the kernel doubles
  if (::setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes) == 0) bound_ = wanted;
}

}  // namespace commlib
