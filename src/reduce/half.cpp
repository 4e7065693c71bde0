// SPDX-License-Identifier: Apache-2.0
//
// Design notes. The loops are those of ops.hpp, with elements that are float32 once they are loaded. They exist twice:
// as the compiler makes them, cloned for several instruction sets, and in chunks of 16 elements with the conversions of
// simd.hpp, which are several times as fast, for processors that have them. The portable loop always does what the
// chunks have left, be that the odd end or everything: nothing can fall between. Both give the same bits.
#include "reduce/half.hpp"

#include <type_traits>

#include "base/simd.hpp"
#include "reduce/loose.hpp"
#include "reduce/ops.hpp"

namespace commlib {

namespace {

constexpr std::size_t kChunk = 16;

std::size_t whole_chunks(std::size_t count) noexcept { return has_half_instructions() ? count / kChunk * kChunk : 0; }

template <class T>
COMMLIB_HALF inline void load_chunk(float* to, const void* from, std::size_t first) noexcept {
  const std::byte* const at = static_cast<const std::byte*>(from) + first * sizeof(T);
  if constexpr (std::is_same_v<T, Float16>) {
    load_16_halves(to, at);
  } else if constexpr (std::is_same_v<T, Bfloat16>) {
    load_16_brains(to, at);
  } else {
    copy_16_floats(to, at);
  }
}

template <class T>
COMMLIB_HALF inline void store_chunk(void* to, const float* from, std::size_t first) noexcept {
  std::byte* const at = static_cast<std::byte*>(to) + first * sizeof(T);
  if constexpr (std::is_same_v<T, Float16>) {
    store_16_halves(at, from);
  } else if constexpr (std::is_same_v<T, Bfloat16>) {
    store_16_brains(at, from);
  } else {
    copy_16_floats(at, from);
  }
}

// The arrays are registers by the time the compiler is through, if it finds no choice to be made in the loops, and turns
// those over a chunk into vectors before it unrolls them: `unroll 1` sees to that.
struct CombineChunks {
  template <class T, class Op, class Last>
  COMMLIB_HALF static void run(Op op, Last last, Outputs to, Inputs in, std::size_t begin, std::size_t end) noexcept {
    for (; begin < end; begin += kChunk) {
      float left[kChunk];
      float right[kChunk];
      load_chunk<T>(left, in.sources[0], begin);
      for (std::size_t source = 1; source + 1 < in.n; ++source) {
        load_chunk<T>(right, in.sources[source], begin);
#pragma GCC unroll 1
        for (std::size_t i = 0; i < kChunk; ++i) left[i] = op.of(left[i], right[i]);
      }
      load_chunk<T>(right, in.sources[in.n - 1], begin);
#pragma GCC unroll 1
      for (std::size_t i = 0; i < kChunk; ++i) left[i] = last.of(left[i], right[i]);
      store_chunk<T>(to.first, left, begin);
      for (std::size_t other = 0; other < to.other_count; ++other) store_chunk<T>(to.others[other], left, begin);
    }
  }
};

template <class To, class From>
COMMLIB_HALF void convert_chunks(void* to, const void* from, std::size_t count) noexcept {
  for (std::size_t first = 0; first < count; first += kChunk) {
    float chunk[kChunk];
    load_chunk<From>(chunk, from, first);
    store_chunk<To>(to, chunk, first);
  }
}

template <class To, class From>
[[gnu::always_inline]] inline void convert_loop(void* to, const void* from, std::size_t count) noexcept {
  auto* const out = loose<To>(to);
  const auto* const in = loose<From>(from);
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) out[i].value = store<To>(load(in[i].value));
}

const std::byte* behind(const void* data, std::size_t bytes) noexcept {
  return static_cast<const std::byte*>(data) + bytes;
}
std::byte* behind(void* data, std::size_t bytes) noexcept { return static_cast<std::byte*>(data) + bytes; }

bool is_brain(DType dtype) noexcept { return dtype == DType::kBfloat16; }

}  // namespace

COMMLIB_CLONES void combine_float16(ReduceOp op, double divisor, Outputs to, Inputs in, std::size_t begin,
                                    std::size_t end) noexcept {
  combine_as<Float16>(op, divisor, to, in, begin, end);
}
COMMLIB_CLONES void combine_bfloat16(ReduceOp op, double divisor, Outputs to, Inputs in, std::size_t begin,
                                     std::size_t end) noexcept {
  combine_as<Bfloat16>(op, divisor, to, in, begin, end);
}
COMMLIB_CLONES void widen_float16(float* to, const void* from, std::size_t count) noexcept {
  convert_loop<float, Float16>(to, from, count);
}
COMMLIB_CLONES void widen_bfloat16(float* to, const void* from, std::size_t count) noexcept {
  convert_loop<float, Bfloat16>(to, from, count);
}
COMMLIB_CLONES void narrow_float16(void* to, const float* from, std::size_t count) noexcept {
  convert_loop<Float16, float>(to, from, count);
}
COMMLIB_CLONES void narrow_bfloat16(void* to, const float* from, std::size_t count) noexcept {
  convert_loop<Bfloat16, float>(to, from, count);
}

void combine_half_portable(DType dtype, ReduceOp op, double divisor, Outputs to, Inputs in, std::size_t begin,
                           std::size_t end) noexcept {
  const auto combine_this = is_brain(dtype) ? combine_bfloat16 : combine_float16;
  combine_this(op, divisor, to, in, begin, end);
}

void widen_portable(DType dtype, float* to, const void* from, std::size_t count) noexcept {
  return is_brain(dtype) ? widen_bfloat16(to, from, count) : widen_float16(to, from, count);
}

void narrow_portable(DType dtype, void* to, const float* from, std::size_t count) noexcept {
  return is_brain(dtype) ? narrow_bfloat16(to, from, count) : narrow_float16(to, from, count);
}

void combine_half(DType dtype, ReduceOp op, double divisor, Outputs to, Inputs in, std::size_t count) noexcept {
  const std::size_t done = whole_chunks(count);
  if (done > 0 && is_brain(dtype)) combine_as<Bfloat16, CombineChunks>(op, divisor, to, in, 0, done);
  if (done > 0 && !is_brain(dtype)) combine_as<Float16, CombineChunks>(op, divisor, to, in, 0, done);
  combine_half_portable(dtype, op, divisor, to, in, done, count);
}

void widen(DType dtype, float* to, const void* from, std::size_t count) noexcept {
  const std::size_t done = whole_chunks(count);
  if (done > 0 && is_brain(dtype)) convert_chunks<float, Bfloat16>(to, from, done);
  if (done > 0 && !is_brain(dtype)) convert_chunks<float, Float16>(to, from, done);
  widen_portable(dtype, to + done, behind(from, 2 * done), count - done);
}

void narrow(DType dtype, void* to, const float* from, std::size_t count) noexcept {
  const std::size_t done = whole_chunks(count);
  if (done > 0 && is_brain(dtype)) convert_chunks<Bfloat16, float>(to, from, done);
  if (done > 0 && !is_brain(dtype)) convert_chunks<Float16, float>(to, from, done);
  narrow_portable(dtype, behind(to, 2 * done), from + done, count - done);
}

}  // namespace commlib
