// SPDX-License-Identifier: Apache-2.0
//
// Design notes. What the loops of kernels.hpp cannot do in one pass over two buffers is done block by block, with an
// accumulator that never leaves the first-level cache: every input is read once, the output is written once, and all
// inputs of a block are read before its output is written, so that the output may lie where an input lay.
#include "reduce/reduce.hpp"

#include <algorithm>
#include <cstring>

#include "base/simd.hpp"
#include "reduce/half.hpp"
#include "reduce/kernels.hpp"

namespace commlib {

namespace {

// So small that the processor already fetches the next block of one input while it still adds the last of this one:
// with four inputs of 32 MiB, 1 KiB is as fast as memory and 8 KiB is half as fast.
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

struct Inputs {
  const void* const* sources;
  std::size_t n;
  std::size_t count;
  std::size_t item_bytes;

  [[nodiscard]] const std::byte* at(std::size_t source, std::size_t element) const noexcept {
    return static_cast<const std::byte*>(sources[source]) + element * item_bytes;
  }
};

[[nodiscard]] std::byte* at(void* destination, std::size_t element, std::size_t item_bytes) noexcept {
  return static_cast<std::byte*>(destination) + element * item_bytes;
}

[[nodiscard]] bool is_half(DType dtype) noexcept { return dtype == DType::kFloat16 || dtype == DType::kBfloat16; }

void copy(DType dtype, void* destination, const void* source, std::size_t count) noexcept {
  if (dtype == DType::kBool) return normalise_bools(destination, source, count);
  if (destination != source && count > 0) std::memcpy(destination, source, count * item_bytes(dtype));
}

// What has been written to the first place.
void copy_to_second(DType dtype, Outputs to, std::size_t count) noexcept {
  if (to.second != nullptr && count > 0) std::memcpy(to.second, to.first, count * item_bytes(dtype));
}

// All but 16-bit floats and Averages of integers: the accumulator is of the dtype itself. A divisor of 1 divides
// nothing.
void reduce_plain(DType dtype, ReduceOp op, Outputs to, const Inputs& in, double divisor) noexcept {
  if (in.n == 1) {
    if (divisor == 1) {
      copy(dtype, to.first, in.sources[0], in.count);
    } else {
      divide(dtype, to.first, in.sources[0], divisor, in.count);
    }
    return copy_to_second(dtype, to, in.count);
  }
  if (in.n == 2) return combine(dtype, op, divisor, to, in.sources[0], in.sources[1], in.count);

  alignas(64) std::byte accumulator[kBlockBytes];
  const std::size_t block = kBlockBytes / in.item_bytes;
  for (std::size_t begin = 0; begin < in.count; begin += block) {
    const std::size_t count = std::min(block, in.count - begin);
    const std::size_t last = in.n - 1;
    combine(dtype, op, 1, accumulator, in.at(0, begin), in.at(1, begin), count);
    for (std::size_t source = 2; source < last; ++source) {
      combine(dtype, op, 1, accumulator, accumulator, in.at(source, begin), count);
    }
    combine(dtype, op, divisor, to.behind(begin * in.item_bytes), accumulator, in.at(last, begin), count);
  }
}

// 16-bit floats, in a float32 accumulator.
void reduce_half(DType dtype, ReduceOp op, Outputs to, const Inputs& in, double divisor) noexcept {
  if (in.n == 1) {  // its mean is itself
    copy(dtype, to.first, in.sources[0], in.count);
    return copy_to_second(dtype, to, in.count);
  }
  if (in.n == 2) return combine(dtype, op, divisor, to, in.sources[0], in.sources[1], in.count);

  constexpr std::size_t kBlock = kBlockBytes / sizeof(float);
  alignas(64) float accumulator[kBlock];
  for (std::size_t begin = 0; begin < in.count; begin += kBlock) {
    const std::size_t count = std::min(kBlock, in.count - begin);
    const std::size_t last = in.n - 1;
    combine_half(dtype, HalfForm::kStart, op, 1, accumulator, in.at(0, begin), in.at(1, begin), count);
    for (std::size_t source = 2; source < last; ++source) {
      combine_half(dtype, HalfForm::kMiddle, op, 1, accumulator, accumulator, in.at(source, begin), count);
    }
    combine_half(dtype, HalfForm::kFinish, op, divisor, to.behind(begin * in.item_bytes), accumulator,
                 in.at(last, begin), count);
  }
}

// The mean of means of 16-bit floats, each weighted by the number of its ranks.
void average_means(DType dtype, void* destination, const Inputs& in, const std::uint32_t* ranks,
                   double all_ranks) noexcept {
  if (in.n == 1) return copy(dtype, destination, in.sources[0], in.count);  // whatever its weight

  constexpr std::size_t kBlock = kBlockBytes / sizeof(float);
  alignas(64) float accumulator[kBlock];
  alignas(64) float weighted[kBlock];
  for (std::size_t begin = 0; begin < in.count; begin += kBlock) {
    const std::size_t count = std::min(kBlock, in.count - begin);
    for (std::size_t source = 0; source < in.n; ++source) {
      float* const into = source == 0 ? accumulator : weighted;
      widen(dtype, into, in.at(source, begin), count);
      if (ranks[source] != 1) scale(into, static_cast<float>(ranks[source]), count);
      const double divisor = source + 1 == in.n ? all_ranks : 1;
      if (source > 0) combine(DType::kFloat32, ReduceOp::kAverage, divisor, accumulator, accumulator, weighted, count);
    }
    narrow(dtype, at(destination, begin, in.item_bytes), accumulator, count);
  }
}

// The Average of integers: sums in int64, divided and narrowed to `result`.
void average_integers(DType dtype, DType result, void* destination, const Inputs& in, std::uint64_t divisor) noexcept {
  constexpr std::size_t kBlock = kBlockBytes / sizeof(std::int64_t);
  alignas(64) std::int64_t sums[kBlock];
  for (std::size_t begin = 0; begin < in.count; begin += kBlock) {
    const std::size_t count = std::min(kBlock, in.count - begin);
    std::fill_n(sums, count, 0);
    for (std::size_t source = 0; source < in.n; ++source) add_to_int64(dtype, sums, in.at(source, begin), count);
    floor_divide(result, at(destination, begin, item_bytes(result)), sums, static_cast<std::int64_t>(divisor), count);
  }
}

}  // namespace

void reduce_local(DType dtype, ReduceOp op, Outputs to, const void* const* sources, std::size_t n,
                  std::size_t count) noexcept {
  const DefaultFloatModes modes;
  const Inputs in{sources, n, count, item_bytes(dtype)};
  const bool is_average = op == ReduceOp::kAverage;
  const double divisor = is_average ? static_cast<double>(n) : 1;
  if (is_half(dtype)) return reduce_half(dtype, op, to, in, divisor);
  if (!is_integer(dtype) || !is_average || n == 1) return reduce_plain(dtype, op, to, in, divisor);
  average_integers(dtype, dtype, to.first, in, n);
  copy_to_second(dtype, to, count);
}

void reduce_host(DType dtype, ReduceOp op, void* destination, const void* const* sources, std::size_t n,
                 std::size_t count) noexcept {
  const DefaultFloatModes modes;
  const Inputs in{sources, n, count, item_bytes(dtype)};
  const bool is_average = op == ReduceOp::kAverage;
  if (is_half(dtype)) return reduce_half(dtype, op, destination, in, is_average ? static_cast<double>(n) : 1);
  if (is_integer(dtype) && is_average) return average_integers(dtype, DType::kInt64, destination, in, 1);
  reduce_plain(dtype, op, destination, in, 1);
}

void reduce_owner(DType dtype, ReduceOp op, void* destination, const void* const* sources, const std::uint32_t* ranks,
                  std::size_t n, std::size_t count) noexcept {
  const DefaultFloatModes modes;
  const DType wire = wire_dtype(dtype, op);
  const Inputs in{sources, n, count, item_bytes(wire)};
  if (op != ReduceOp::kAverage) {
    return is_half(dtype) ? reduce_half(dtype, op, destination, in, 1) : reduce_plain(dtype, op, destination, in, 1);
  }
  std::uint64_t all_ranks = 0;
  for (std::size_t host = 0; host < n; ++host) all_ranks += ranks[host];
  if (is_integer(dtype)) return average_integers(wire, dtype, destination, in, all_ranks);
  const auto divisor = static_cast<double>(all_ranks);
  if (is_half(dtype)) return average_means(dtype, destination, in, ranks, divisor);
  reduce_plain(dtype, op, destination, in, divisor);
}

}  // namespace commlib
