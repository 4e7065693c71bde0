// SPDX-License-Identifier: Apache-2.0
// Words of the protocol between hosts and owners that both sides need (see base/frame.hpp and server/engine.hpp).
#pragma once

#include <cstdint>

#include "base/frame.hpp"

namespace commlib {

// The unit of placement, and the most bytes of a tensor that one piece carries.
inline constexpr std::uint64_t kGranuleBytes = 64 * 1024;

// Frame::flags
inline constexpr std::uint8_t kFlagDisagree = 1;  // READY, EAGER: the ranks of this host disagree about the signature

// Frame::member of ABORT and FAIL: a global rank, or this bit and the index of a dedicated server.
inline constexpr std::uint32_t kServerBit = std::uint32_t{1} << 31;

// Data frames carry elements and leave by priority; all others steer and leave first.
[[nodiscard]] constexpr bool is_data(FrameKind kind) noexcept {
  return kind == FrameKind::kEager || kind == FrameKind::kPush || kind == FrameKind::kResult;
}

// What the owner's engine takes, and what it sends.
[[nodiscard]] constexpr bool is_for_owner(FrameKind kind) noexcept {
  return kind == FrameKind::kReady || kind == FrameKind::kEager || kind == FrameKind::kPush;
}
[[nodiscard]] constexpr bool is_from_owner(FrameKind kind) noexcept {
  return kind == FrameKind::kGrant || kind == FrameKind::kResult || kind == FrameKind::kFail;
}

// Bytes a frame takes of a connection.
[[nodiscard]] constexpr std::uint64_t wire_bytes(const Frame& frame) noexcept {
  return sizeof(Frame) + std::uint64_t{frame.payload_bytes};
}

}  // namespace commlib
