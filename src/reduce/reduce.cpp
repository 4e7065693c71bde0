// SPDX-License-Identifier: Apache-2.0
//
// Design notes. One pass where a loop of kernels.hpp does all of it. What changes its type on the way (the mean of means,
// the Average of integers) is done block by block, with an accumulator that never leaves the first-level cache: every
// input is read once, the output is written once, and all inputs of a block are read before its output is written, so
// that the output may lie where an input lay.
#include "reduce/reduce.hpp"

#include <algorithm>
#include <cstring>

#include "base/simd.hpp"
#include "reduce/half.hpp"
#include "reduce/kernels.hpp"

namespace commlib {

namespace {

// So small that the processor already fetches the next block of one input while it still adds the last of this one.
constexpr std::size_t kBlockBytes = 1024;

// A framework may have told the calling thread to flush subnormals or to round otherwise. Other threads work on other
// parts of the same tensor, so the modes must be the same for all.
class DefaultFloatModes {
 public:
  DefaultFloatModes() noexcept : before_(float_modes()) {
    if (before_ != kDefaultFloatModes) set_float_modes(kDefaultFloatModes);
  }
  ~DefaultFloatModes() {
    if (before_ != kDefaultFloatModes) set_float_modes(before_);
  }
  DefaultFloatModes(const DefaultFloatModes&) = delete;
  DefaultFloatModes& operator=(const DefaultFloatModes&) = delete;

 private:
  const std::uint32_t before_;
};

[[nodiscard]] const std::byte* at(const void* source, std::size_t element, std::size_t item_bytes) noexcept {
  return static_cast<const std::byte*>(source) + element * item_bytes;
}
[[nodiscard]] std::byte* at(void* destination, std::size_t element, std::size_t item_bytes) noexcept {
  return static_cast<std::byte*>(destination) + element * item_bytes;
}

[[nodiscard]] bool is_half(DType dtype) noexcept { return dtype == DType::kFloat16 || dtype == DType::kBfloat16; }

void copy(DType dtype, void* destination, const void* source, std::size_t count) noexcept {
  if (dtype == DType::kBool) return normalise_bools(destination, source, count);
  if (destination != source && count > 0) std::memcpy(destination, source, count * item_bytes(dtype));
}

// `bytes` bytes of what has been written to the first place, from `begin` on.
void copy_to_others(Outputs to, std::size_t begin, std::size_t bytes) noexcept {
  if (bytes == 0) return;
  for (std::size_t i = 0; i < to.other_count; ++i) {
    std::memcpy(static_cast<std::byte*>(to.others[i]) + begin, static_cast<std::byte*>(to.first) + begin, bytes);
  }
}

// All but Averages of integers. A divisor of 1 divides nothing.
void reduce_plain(DType dtype, ReduceOp op, Outputs to, Inputs in, std::size_t count, double divisor) noexcept {
  if (in.n > 1) return combine(dtype, op, divisor, to, in, count);
  if (divisor == 1) {
    copy(dtype, to.first, in.sources[0], count);
  } else {
    divide(dtype, to.first, in.sources[0], divisor, count);
  }
  copy_to_others(to, 0, count * item_bytes(dtype));
}

// The mean of means of 16-bit floats, each weighted by the number of its ranks.
void average_means(DType dtype, void* destination, Inputs in, std::size_t all, const std::uint32_t* ranks,
                   double all_ranks) noexcept {
  const std::size_t item = item_bytes(dtype);
  if (in.n == 1) return copy(dtype, destination, in.sources[0], all);  // whatever its weight

  constexpr std::size_t kBlock = kBlockBytes / sizeof(float);
  alignas(64) float accumulator[kBlock];
  alignas(64) float weighted[kBlock];
  const void* const both[] = {accumulator, weighted};
  for (std::size_t begin = 0; begin < all; begin += kBlock) {
    const std::size_t count = std::min(kBlock, all - begin);
    for (std::size_t source = 0; source < in.n; ++source) {
      float* const into = source == 0 ? accumulator : weighted;
      widen(dtype, into, at(in.sources[source], begin, item), count);
      if (ranks[source] != 1) scale(into, static_cast<float>(ranks[source]), count);
      const double divisor = source + 1 == in.n ? all_ranks : 1;
      if (source > 0) combine(DType::kFloat32, ReduceOp::kAverage, divisor, accumulator, Inputs{both, 2}, count);
    }
    narrow(dtype, at(destination, begin, item), accumulator, count);
  }
}

// The Average of integers of type `dtype`: sums in int64, divided and narrowed to `result`.
void average_integers(DType dtype, DType result, Outputs to, Inputs in, std::size_t all,
                      std::uint64_t divisor) noexcept {
  constexpr std::size_t kBlock = kBlockBytes / sizeof(std::int64_t);
  alignas(64) std::int64_t sums[kBlock];
  const std::size_t item = item_bytes(result);
  for (std::size_t begin = 0; begin < all; begin += kBlock) {
    const std::size_t count = std::min(kBlock, all - begin);
    std::fill_n(sums, count, 0);
    for (std::size_t source = 0; source < in.n; ++source) {
      add_to_int64(dtype, sums, at(in.sources[source], begin, item_bytes(dtype)), count);
    }
    floor_divide(result, at(to.first, begin, item), sums, static_cast<std::int64_t>(divisor), count);
    copy_to_others(to, begin * item, count * item);
  }
}

}  // namespace

void reduce_local(DType dtype, ReduceOp op, Outputs to, const void* const* sources, std::size_t n,
                  std::size_t count) noexcept {
  const DefaultFloatModes modes;
  const Inputs in{sources, n};
  const bool is_average = op == ReduceOp::kAverage;
  if (is_average && is_integer(dtype) && n > 1) return average_integers(dtype, dtype, to, in, count, n);
  reduce_plain(dtype, op, to, in, count, is_average ? static_cast<double>(n) : 1);
}

void reduce_host(DType dtype, ReduceOp op, void* destination, const void* const* sources, std::size_t n,
                 std::size_t count) noexcept {
  const DefaultFloatModes modes;
  const Inputs in{sources, n};
  const bool is_average = op == ReduceOp::kAverage;
  if (is_average && is_integer(dtype)) return average_integers(dtype, DType::kInt64, destination, in, count, 1);
  reduce_plain(dtype, op, destination, in, count, is_average && is_half(dtype) ? static_cast<double>(n) : 1);
}

void reduce_owner(DType dtype, ReduceOp op, void* destination, const void* const* sources, const std::uint32_t* ranks,
                  std::size_t n, std::size_t count) noexcept {
  const DefaultFloatModes modes;
  const Inputs in{sources, n};
  if (op != ReduceOp::kAverage) return reduce_plain(dtype, op, destination, in, count, 1);
  std::uint64_t all_ranks = 0;
  for (std::size_t host = 0; host < n; ++host) all_ranks += ranks[host];
  if (is_integer(dtype)) return average_integers(wire_dtype(dtype, op), dtype, destination, in, count, all_ranks);
  const auto divisor = static_cast<double>(all_ranks);
  if (is_half(dtype)) return average_means(dtype, destination, in, count, ranks, divisor);
  reduce_plain(dtype, op, destination, in, count, divisor);
}

}  // namespace commlib
