// SPDX-License-Identifier: Apache-2.0
#include "server/share.hpp"

#include "reduce/reduce.hpp"
#include "sched/wire.hpp"

namespace commlib {

namespace {

// Nobody's virtual byte space comes near this; below it no address can overflow.
constexpr std::uint64_t kMaxStart = std::uint64_t{1} << 62;

DType dtype_of(const Frame& frame) noexcept { return static_cast<DType>(frame.dtype); }

// What can be added up for weeks: no integers, which wrap, and no narrow floats, which stand still.
bool is_accumulable(DType dtype, ReduceOp op) noexcept {
  return op == ReduceOp::kSum && (dtype == DType::kFloat32 || dtype == DType::kFloat64);
}

}  // namespace

const char* fault_of_announcement(const Frame& frame, std::uint32_t hosts, std::uint64_t partition_bytes) noexcept {
  if (frame.round == 0) return "rounds start at 1";
  if (frame.dtype >= kDTypeCount) return "no such dtype";
  if (frame.op >= kReduceOpCount) return "no such operation";
  if (frame.start % 64 != 0 || frame.start >= kMaxStart) return "the virtual address is impossible";
  if (frame.count > partition_bytes / item_bytes(dtype_of(frame))) return "more elements than a partition has";
  if (frame.whole > 1) return "`whole` is neither 0 nor 1";
  if (frame.whole == 1 && frame.count * item_bytes(dtype_of(frame)) > kGranuleBytes) return "too large to be whole";
  if (frame.kind == FrameKind::kEager && frame.whole != 1) return "eager, but not whole";
  switch (frame.collective) {
    case Collective::kReduce:
      if (!is_supported(dtype_of(frame), static_cast<ReduceOp>(frame.op))) return "no such operation on this dtype";
      return nullptr;
    case Collective::kBroadcast:
      return frame.member >= hosts ? "the root is on no host" : nullptr;
    case Collective::kBarrier:
      return frame.count != 0 ? "a barrier has no elements" : nullptr;
    case Collective::kAccumulate:
      if (frame.member >= hosts) return "it is of no host";
      if (!is_accumulable(dtype_of(frame), static_cast<ReduceOp>(frame.op))) return "not to be accumulated";
      return nullptr;
  }
  return "no such collective";
}

bool is_same_operation(const Frame& a, const Frame& b) noexcept {
  return a.hash == b.hash && a.start == b.start && a.count == b.count && a.dtype == b.dtype && a.op == b.op &&
         a.collective == b.collective && a.whole == b.whole &&
         (a.collective != Collective::kBroadcast || a.member == b.member);
}

bool contributes(const Frame& terms, PeerId host) noexcept {
  return terms.collective == Collective::kReduce ||
         ((terms.collective == Collective::kBroadcast || terms.collective == Collective::kAccumulate) &&
          terms.member == host);
}

std::uint32_t announcers(const Frame& terms, std::uint32_t hosts) noexcept {
  return terms.collective == Collective::kAccumulate ? 1 : hosts;
}

bool is_answered(const Frame& terms, PeerId host) noexcept {
  if (terms.collective == Collective::kAccumulate) return terms.member == host;
  return terms.collective != Collective::kBroadcast || terms.member != host;
}

std::uint64_t eager_bytes(const Frame& terms, PeerId host) noexcept {
  return contributes(terms, host) ? terms.count * push_item_bytes(terms) : 0;
}

std::size_t push_item_bytes(const Frame& terms) noexcept {
  if (terms.collective != Collective::kReduce) return item_bytes(dtype_of(terms));
  return item_bytes(wire_dtype(dtype_of(terms), static_cast<ReduceOp>(terms.op)));
}

std::size_t result_item_bytes(const Frame& terms) noexcept { return item_bytes(dtype_of(terms)); }

bool owns_a_piece(const Placement& placement, PeerId owner, const Frame& terms) noexcept {
  if (placement.owner_at(terms.start) == owner) return true;
  if (terms.whole == 1) return false;
  const std::uint64_t end = terms.start + terms.count * result_item_bytes(terms);
  const std::uint64_t second = (terms.start / kGranuleBytes + 1) * kGranuleBytes;
  for (std::uint64_t at = second; at < end; at += kGranuleBytes) {
    if (placement.owner_at(at) == owner) return true;
  }
  return false;
}

}  // namespace commlib
