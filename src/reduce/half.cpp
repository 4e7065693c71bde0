// SPDX-License-Identifier: Apache-2.0
//
// Design notes. The loops are those of ops.hpp, with elements that are float32 once they are loaded. They exist twice:
// as the compiler makes them, cloned for several instruction sets, and in chunks of 16 elements with the conversions of
// simd.hpp, which are several times as fast, for processors that have them, of two widths. The portable loop always does what the
// chunks have left, be that the odd end or everything: nothing can fall between. Both give the same bits.
#include "reduce/half.hpp"

#include <type_traits>

#include "base/simd.hpp"
#include "reduce/loose.hpp"
#include "reduce/ops.hpp"

namespace commlib {

namespace {

constexpr std::size_t kChunk = 16;

std::size_t whole_chunks(std::size_t count) noexcept { return HalfChunk::is_supported() ? count / kChunk * kChunk : 0; }

// There is more to do for a line of 16-bit floats than the processor can look past to find the next lines by itself:
// without this they take a fifth longer from memory than as many bytes of float32. Behind the end it does nothing.
[[gnu::always_inline]] inline void fetch_ahead(const void* from, std::size_t offset) noexcept {
  constexpr std::size_t kAheadBytes = 1024;
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(from) + offset + kAheadBytes));
}

template <class Chunk, class T>
[[gnu::always_inline]] inline void load_chunk(float* to, const void* from, std::size_t first) noexcept {
  const std::byte* const at = static_cast<const std::byte*>(from) + first * sizeof(T);
  if constexpr (std::is_same_v<T, Float16>) {
    Chunk::load_halves(to, at);
  } else if constexpr (std::is_same_v<T, Bfloat16>) {
    Chunk::load_brains(to, at);
  } else {
    Chunk::copy_floats(to, at);
  }
}

template <class Chunk, class T>
[[gnu::always_inline]] inline void store_chunk(void* to, const float* from, std::size_t first) noexcept {
  std::byte* const at = static_cast<std::byte*>(to) + first * sizeof(T);
  if constexpr (std::is_same_v<T, Float16>) {
    Chunk::store_halves(at, from);
  } else if constexpr (std::is_same_v<T, Bfloat16>) {
    Chunk::store_brains(at, from);
  } else {
    Chunk::copy_floats(at, from);
  }
}

// The arrays are registers by the time the compiler is through, if it finds no choice to be made in the loops, and turns
// those over a chunk into vectors before it unrolls them: `unroll 1` sees to that.
template <class Chunk, class T, class Op, class Last>
[[gnu::always_inline]] inline void combine_by(Op op, Last last, Outputs to, Inputs in, std::size_t begin,
                                              std::size_t end) noexcept {
  if (in.n == 2 && to.other_count <= 1) {  // the common case, without loops within the loop
    const void* const first = in.sources[0];
    const void* const second = in.sources[1];
    void* const also = to.other_count == 1 ? to.others[0] : to.first;
    for (; begin < end; begin += kChunk) {
      float left[kChunk];
      float right[kChunk];
      fetch_ahead(first, begin * sizeof(T));
      fetch_ahead(second, begin * sizeof(T));
      load_chunk<Chunk, T>(left, first, begin);
      load_chunk<Chunk, T>(right, second, begin);
#pragma GCC unroll 1
      for (std::size_t i = 0; i < kChunk; ++i) left[i] = last.of(left[i], right[i]);
      store_chunk<Chunk, T>(to.first, left, begin);
      store_chunk<Chunk, T>(also, left, begin);
    }
    return;
  }
  for (; begin < end; begin += kChunk) {
    float left[kChunk];
    float right[kChunk];
    load_chunk<Chunk, T>(left, in.sources[0], begin);
    for (std::size_t source = 1; source + 1 < in.n; ++source) {
      load_chunk<Chunk, T>(right, in.sources[source], begin);
#pragma GCC unroll 1
      for (std::size_t i = 0; i < kChunk; ++i) left[i] = op.of(left[i], right[i]);
    }
    load_chunk<Chunk, T>(right, in.sources[in.n - 1], begin);
#pragma GCC unroll 1
    for (std::size_t i = 0; i < kChunk; ++i) left[i] = last.of(left[i], right[i]);
    store_chunk<Chunk, T>(to.first, left, begin);
    for (std::size_t other = 0; other < to.other_count; ++other) store_chunk<Chunk, T>(to.others[other], left, begin);
  }
}

template <class Chunk, class To, class From>
[[gnu::always_inline]] inline void convert_by(void* to, const void* from, std::size_t count) noexcept {
  for (std::size_t first = 0; first < count; first += kChunk) {
    float chunk[kChunk];
    load_chunk<Chunk, From>(chunk, from, first);
    store_chunk<Chunk, To>(to, chunk, first);
  }
}

// What is inlined into these may use the instructions they say.
struct CombineChunks {
  template <class T, class Op, class Last>
  COMMLIB_HALF static void run(Op op, Last last, Outputs to, Inputs in, std::size_t begin, std::size_t end) noexcept {
    combine_by<HalfChunk, T>(op, last, to, in, begin, end);
  }
};
struct CombineWideChunks {
  template <class T, class Op, class Last>
  COMMLIB_WIDE_HALF static void run(Op op, Last last, Outputs to, Inputs in, std::size_t begin,
                                    std::size_t end) noexcept {
    combine_by<WideHalfChunk, T>(op, last, to, in, begin, end);
  }
};

template <class T>
void combine_chunks(bool wide, ReduceOp op, double divisor, Outputs to, Inputs in, std::size_t count) noexcept {
  if (wide) return combine_as<T, CombineWideChunks>(op, divisor, to, in, 0, count);
  combine_as<T, CombineChunks>(op, divisor, to, in, 0, count);
}

template <class To, class From>
COMMLIB_HALF void convert_half_chunks(void* to, const void* from, std::size_t count) noexcept {
  convert_by<HalfChunk, To, From>(to, from, count);
}
template <class To, class From>
COMMLIB_WIDE_HALF void convert_wide_chunks(void* to, const void* from, std::size_t count) noexcept {
  convert_by<WideHalfChunk, To, From>(to, from, count);
}

template <class To, class From>
void convert_chunks(bool wide, void* to, const void* from, std::size_t count) noexcept {
  if (wide) return convert_wide_chunks<To, From>(to, from, count);
  convert_half_chunks<To, From>(to, from, count);
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

void combine_half(DType dtype, ReduceOp op, double divisor, Outputs to, Inputs in, std::size_t count,
                  bool wide) noexcept {
  const std::size_t done = whole_chunks(count);
  if (done > 0 && is_brain(dtype)) combine_chunks<Bfloat16>(wide, op, divisor, to, in, done);
  if (done > 0 && !is_brain(dtype)) combine_chunks<Float16>(wide, op, divisor, to, in, done);
  combine_half_portable(dtype, op, divisor, to, in, done, count);
}

void widen(DType dtype, float* to, const void* from, std::size_t count, bool wide) noexcept {
  const std::size_t done = whole_chunks(count);
  if (done > 0 && is_brain(dtype)) convert_chunks<float, Bfloat16>(wide, to, from, done);
  if (done > 0 && !is_brain(dtype)) convert_chunks<float, Float16>(wide, to, from, done);
  widen_portable(dtype, to + done, behind(from, 2 * done), count - done);
}

void narrow(DType dtype, void* to, const float* from, std::size_t count, bool wide) noexcept {
  const std::size_t done = whole_chunks(count);
  if (done > 0 && is_brain(dtype)) convert_chunks<Bfloat16, float>(wide, to, from, done);
  if (done > 0 && !is_brain(dtype)) convert_chunks<Float16, float>(wide, to, from, done);
  narrow_portable(dtype, behind(to, 2 * done), from + done, count - done);
}

}  // namespace commlib
