// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "base/simd.hpp"
#include "reduce/half.hpp"
#include "reduce/reduce.hpp"
#include "window.hpp"

using commlib::Bfloat16;  // their conversions are proven in test_half.cpp
using commlib::DType;
using commlib::Float16;
using commlib::ReduceOp;

namespace {

// ---- The truth, one element at a time, in the plainest way.

enum class Bool : std::uint8_t {};

template <class T>
constexpr bool kIsHalf = std::is_same_v<T, Float16> || std::is_same_v<T, Bfloat16>;

template <class T>
T combine(ReduceOp op, T a, T b) {
  switch (op) {
    case ReduceOp::kMin:
      return std::isnan(a) ? a : std::isnan(b) ? b : std::min(b, a);
    case ReduceOp::kMax:
      return std::isnan(a) ? a : std::isnan(b) ? b : std::max(b, a);
    case ReduceOp::kProduct:
      return a * b;
    default:
      return a + b;
  }
}

__int128 combine(ReduceOp op, __int128 a, __int128 b) {
  switch (op) {
    case ReduceOp::kMin:
      return a < b ? a : b;
    case ReduceOp::kMax:
      return a > b ? a : b;
    case ReduceOp::kProduct:
      return static_cast<std::int64_t>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
    default:
      return a + b;
  }
}

__int128 floor_of(__int128 sum, __int128 divisor) {
  __int128 quotient = sum / divisor;
  while (quotient * divisor > sum) --quotient;
  return quotient;
}

template <class T>
T reduced(ReduceOp op, const std::vector<T>& inputs) {
  const auto n = inputs.size();
  if constexpr (kIsHalf<T>) {
    if (n == 1) return inputs[0];
    float sum = inputs[0].number();
    for (std::size_t i = 1; i < n; ++i) sum = combine(op, sum, inputs[i].number());
    if (op == ReduceOp::kAverage) sum = sum / static_cast<float>(n);
    return T::of(sum);
  } else if constexpr (std::is_same_v<T, Bool>) {
    bool any = false;
    bool all = true;
    for (const Bool input : inputs) {
      any = any || input != Bool{};
      all = all && input != Bool{};
    }
    return static_cast<Bool>(op == ReduceOp::kSum || op == ReduceOp::kMax ? any : all);
  } else if constexpr (std::is_floating_point_v<T>) {
    T sum = inputs[0];
    for (std::size_t i = 1; i < n; ++i) sum = combine(op, sum, inputs[i]);
    return op == ReduceOp::kAverage ? sum / static_cast<T>(n) : sum;
  } else {
    __int128 sum = inputs[0];
    for (std::size_t i = 1; i < n; ++i) sum = combine(op, sum, static_cast<__int128>(inputs[i]));
    if (op == ReduceOp::kAverage) sum = floor_of(static_cast<std::int64_t>(sum), static_cast<__int128>(n));
    return static_cast<T>(sum);
  }
}

// The same bits, or NaN on both sides.
template <class T>
bool same(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (std::isnan(a) && std::isnan(b)) return true;
  } else if constexpr (kIsHalf<T>) {
    if (std::isnan(a.number()) && std::isnan(b.number())) return true;
  }
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

// ---- Inputs.

enum class Kind { kAnyBits, kModerate, kNearOne };

template <class T>
T random_value(std::mt19937_64& random, Kind kind) {
  const std::uint64_t bits = random();
  T value{};
  std::memcpy(&value, &bits, sizeof(T));
  if (kind == Kind::kAnyBits) return value;
  double moderate = static_cast<double>(static_cast<std::int64_t>(bits)) * 0x1p-60;  // −8 … 8
  if (kind == Kind::kNearOne) moderate = std::copysign(1 + std::abs(moderate) / 8, moderate);
  if constexpr (kIsHalf<T>) return T::of(static_cast<float>(moderate));
  if constexpr (std::is_floating_point_v<T>) return static_cast<T>(moderate);
  if constexpr (std::is_same_v<T, Bool>) return bits % 3 == 0 ? Bool{} : value;
  if constexpr (std::is_integral_v<T>) return static_cast<T>(static_cast<std::int64_t>(moderate));
}

template <class T>
struct Buffers {
  Buffers(std::size_t n, std::size_t count, std::size_t first_shift, Kind kind, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    values.resize(n);
    for (std::size_t source = 0; source < n; ++source) {
      const std::size_t shift = first_shift == 0 ? 0 : (first_shift + source) % 8;
      for (std::size_t i = 0; i < count; ++i) values[source].push_back(random_value<T>(random, kind));
      bytes.emplace_back(shift + count * sizeof(T) + kGuard, std::byte{0x5A});
      if (count > 0) std::memcpy(bytes.back().data() + shift, values[source].data(), count * sizeof(T));
      pointers.push_back(bytes.back().data() + shift);
    }
  }
  [[nodiscard]] std::vector<T> inputs_at(std::size_t i) const {
    std::vector<T> inputs;
    for (const auto& source : values) inputs.push_back(source[i]);
    return inputs;
  }
  [[nodiscard]] const void* const* sources() const { return const_cast<const void* const*>(pointers.data()); }

  static constexpr std::size_t kGuard = 8;
  std::vector<std::vector<T>> values;
  std::vector<std::vector<std::byte>> bytes;
  std::vector<void*> pointers;
};

template <class T>
T element(const void* data, std::size_t i) {
  T value{};
  std::memcpy(&value, static_cast<const std::byte*>(data) + i * sizeof(T), sizeof(T));
  return value;
}

template <class T>
void check_local(DType dtype, ReduceOp op, std::size_t n, std::size_t count, std::size_t shift, Kind kind) {
  CAPTURE(static_cast<int>(dtype));
  CAPTURE(static_cast<int>(op));
  CAPTURE(n);
  CAPTURE(count);
  CAPTURE(shift);
  // Into a buffer of its own (in_place == n), and onto each of the sources.
  for (std::size_t in_place = 0; in_place <= n; in_place += (n > 4 ? n / 2 : 1)) {
    Buffers<T> buffers(n, count, shift, kind, 1000 * n + count);
    std::vector<std::byte> own(count * sizeof(T) + shift + Buffers<T>::kGuard, std::byte{0x5A});
    const bool is_own = in_place >= n;
    void* const destination = is_own ? own.data() + shift : buffers.pointers[in_place];
    commlib::reduce_local(dtype, op, destination, buffers.sources(), n, count);
    int wrong = 0;
    for (std::size_t i = 0; i < count; ++i) {
      if (!same(element<T>(destination, i), reduced(op, buffers.inputs_at(i)))) ++wrong;
    }
    CHECK(wrong == 0);
    const std::byte* const guard = static_cast<std::byte*>(destination) + count * sizeof(T);
    for (std::size_t i = 0; i < Buffers<T>::kGuard; ++i) REQUIRE(guard[i] == std::byte{0x5A});
    for (std::size_t source = 0; source < n; ++source) {  // the other sources are as they were
      if (source == in_place || count == 0) continue;
      REQUIRE(std::memcmp(buffers.pointers[source], buffers.values[source].data(), count * sizeof(T)) == 0);
    }
  }
}

// Calls `test` with a value of each type and its DType.
template <class Test>
void for_all_dtypes(Test test) {
  test(Bool{}, DType::kBool);
  test(std::uint8_t{}, DType::kUint8);
  test(std::int8_t{}, DType::kInt8);
  test(std::int16_t{}, DType::kInt16);
  test(std::int32_t{}, DType::kInt32);
  test(std::int64_t{}, DType::kInt64);
  test(Float16{}, DType::kFloat16);
  test(Bfloat16{}, DType::kBfloat16);
  test(float{}, DType::kFloat32);
  test(double{}, DType::kFloat64);
}

constexpr ReduceOp kOps[] = {ReduceOp::kAverage, ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct};

}  // namespace

TEST_CASE("one host: every dtype, operation, length and alignment gives what the plain loop gives") {
  for_all_dtypes([](auto zero, DType dtype) {
    using T = decltype(zero);
    for (const ReduceOp op : kOps) {
      if (!commlib::is_supported(dtype, op)) continue;
      for (const std::size_t n : {1U, 2U, 3U, 9U}) {
        for (const std::size_t count : {0U, 1U, 2U, 7U, 8U, 9U, 31U, 33U, 64U, 127U}) {
          check_local<T>(dtype, op, n, count, count % 8, Kind::kModerate);
          check_local<T>(dtype, op, n, count, (count + n) % 8, Kind::kAnyBits);
        }
        // More than a block.
        if (n <= 3) check_local<T>(dtype, op, n, 8192 + 5, n % 2 * 3, n % 2 == 0 ? Kind::kModerate : Kind::kAnyBits);
      }
    }
  });
}

TEST_CASE("the bits do not depend on how a tensor is cut, NaNs included") {
  for_all_dtypes([](auto zero, DType dtype) {
    using T = decltype(zero);
    constexpr std::size_t kCount = 9001;
    for (const ReduceOp op : kOps) {
      if (!commlib::is_supported(dtype, op)) continue;
      for (const std::size_t n : {2U, 3U}) {
        Buffers<T> buffers(n, kCount, 1, Kind::kAnyBits, 42);
        if constexpr (std::is_floating_point_v<T>) {  // different NaNs that meet
          for (std::size_t i = 0; i < kCount; i += 3) {
            for (std::size_t source = 0; source < n; ++source) {
              const T nan = std::copysign(std::numeric_limits<T>::quiet_NaN(), source % 2 == 0 ? T{1} : T{-1});
              std::memcpy(static_cast<std::byte*>(buffers.pointers[source]) + i * sizeof(T), &nan, sizeof nan);
            }
          }
        }
        std::vector<std::byte> whole(kCount * sizeof(T));
        commlib::reduce_local(dtype, op, whole.data(), buffers.sources(), n, kCount);
        std::vector<std::byte> pieces(kCount * sizeof(T) + 1);
        std::mt19937 random(3);
        for (std::size_t begin = 0; begin < kCount;) {
          const std::size_t count = std::min<std::size_t>(random() % 100, kCount - begin);
          std::vector<const void*> sources;
          for (void* const source : buffers.pointers) {
            sources.push_back(static_cast<std::byte*>(source) + begin * sizeof(T));
          }
          commlib::reduce_local(dtype, op, pieces.data() + 1 + begin * sizeof(T), sources.data(), n, count);
          begin += count;
        }
        CAPTURE(static_cast<int>(dtype));
        CAPTURE(static_cast<int>(op));
        CHECK(std::memcmp(whole.data(), pieces.data() + 1, whole.size()) == 0);
      }
    }
  });
}

TEST_CASE("Min and Max are NaN when any input is, and a sum of infinities of both signs is") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  const float a[] = {nan, 1, 2, infinity, -0.0F};
  const float b[] = {1, nan, 3, -infinity, -0.0F};
  const void* const sources[] = {a, b};
  float result[5];
  commlib::reduce_local(DType::kFloat32, ReduceOp::kMin, result, sources, 2, 5);
  CHECK(std::isnan(result[0]));
  CHECK(std::isnan(result[1]));
  CHECK(result[2] == 2);
  CHECK(result[3] == -infinity);
  commlib::reduce_local(DType::kFloat32, ReduceOp::kMax, result, sources, 2, 5);
  CHECK(std::isnan(result[0]));
  CHECK(std::isnan(result[1]));
  CHECK(result[2] == 3);
  CHECK(result[3] == infinity);
  commlib::reduce_local(DType::kFloat32, ReduceOp::kSum, result, sources, 2, 5);
  CHECK(std::isnan(result[3]));
  CHECK(std::signbit(result[4]));
}

TEST_CASE("integer sums and products wrap, and averages round towards minus infinity") {
  const std::int16_t a[] = {32767, -32768, 300, -7, -1};
  const std::int16_t b[] = {1, -1, 300, 2, 0};
  const void* const sources[] = {a, b};
  std::int16_t result[5];
  commlib::reduce_local(DType::kInt16, ReduceOp::kSum, result, sources, 2, 5);
  CHECK(result[0] == -32768);
  CHECK(result[1] == 32767);
  commlib::reduce_local(DType::kInt16, ReduceOp::kProduct, result, sources, 2, 5);
  CHECK(result[2] == static_cast<std::int16_t>(90000));
  commlib::reduce_local(DType::kInt16, ReduceOp::kAverage, result, sources, 2, 5);
  CHECK(result[0] == 16384);  // nothing wraps on the way
  CHECK(result[3] == -3);     // ⌊−2.5⌋
  CHECK(result[4] == -1);     // ⌊−0.5⌋
}

TEST_CASE("16-bit floats are rounded once, not after each addition") {
  // 1 + 2^-11 is a tie that rounds to 1 in float16, twice; together they are 1 + 2^-10, a float16.
  const std::uint16_t one = 0x3C00;
  const std::uint16_t tiny = 0x1000;  // 2^-11
  const void* const sources[] = {&one, &tiny, &tiny};
  std::uint16_t result = 0;
  commlib::reduce_local(DType::kFloat16, ReduceOp::kSum, &result, sources, 3, 1);
  CHECK(result == 0x3C01);
}

TEST_CASE("two outputs: both get the bits that one would, also where inputs lie") {
  for_all_dtypes([&](auto zero, DType dtype) {
    using T = decltype(zero);
    for (const ReduceOp op : kOps) {
      if (!commlib::is_supported(dtype, op)) continue;
      for (const std::size_t n : {1u, 2u, 3u, 5u}) {
        for (const std::size_t count : {0u, 1u, 15u, 17u, 1003u, 5000u}) {
          CAPTURE(static_cast<int>(dtype));
          CAPTURE(static_cast<int>(op));
          CAPTURE(n);
          CAPTURE(count);
          const std::size_t bytes = count * sizeof(T);
          Buffers<T> buffers(n, count, 1, Kind::kModerate, 91);
          std::vector<std::byte> expected(bytes + 1);
          commlib::reduce_local(dtype, op, expected.data(), buffers.sources(), n, count);
          // The last source is the second output, at an odd address; the first output is elsewhere.
          std::vector<std::byte> last(bytes + 1);
          if (bytes > 0) std::memcpy(last.data() + 1, buffers.sources()[n - 1], bytes);
          std::vector<const void*> sources(buffers.sources(), buffers.sources() + n);
          sources[n - 1] = last.data() + 1;
          std::vector<std::byte> first(bytes + 3);
          void* const second = last.data() + 1;
          const commlib::Outputs outputs(first.data() + 3, &second, 1);
          commlib::reduce_local(dtype, op, outputs, sources.data(), n, count);
          CHECK(std::memcmp(first.data() + 3, expected.data(), bytes) == 0);
          CHECK(std::memcmp(last.data() + 1, expected.data(), bytes) == 0);
        }
      }
    }
  });
}

TEST_CASE("all sources are outputs, in any order of these: all get the bits that one would, and none behind them") {
  for_all_dtypes([&](auto zero, DType dtype) {
    using T = decltype(zero);
    for (const ReduceOp op : kOps) {
      if (!commlib::is_supported(dtype, op)) continue;
      for (const std::size_t n : {1u, 2u, 3u, 8u, 17u}) {
        for (const std::size_t count : {0u, 1u, 31u, 33u, 1003u}) {
          CAPTURE(static_cast<int>(dtype));
          CAPTURE(static_cast<int>(op));
          CAPTURE(n);
          CAPTURE(count);
          const std::size_t bytes = count * sizeof(T);
          std::vector<std::byte> expected(bytes + 1);
          Buffers<T> buffers(n, count, 1, Kind::kModerate, 17);
          commlib::reduce_local(dtype, op, expected.data(), buffers.sources(), n, count);
          // The calling rank's own place comes first, whichever source it is.
          std::vector<void*> places(buffers.pointers);
          std::rotate(places.begin(), places.begin() + static_cast<std::ptrdiff_t>(n / 2), places.end());
          const commlib::Outputs outputs(places[0], places.data() + 1, n - 1);
          commlib::reduce_local(dtype, op, outputs, buffers.sources(), n, count);
          for (const void* place : buffers.pointers) {
            CHECK(std::memcmp(place, expected.data(), bytes) == 0);
            CHECK(static_cast<const std::byte*>(place)[bytes] == std::byte{0x5A});
          }
        }
      }
    }
  });
}

TEST_CASE("two levels: hosts of several sizes give what all ranks together give") {
  constexpr std::size_t kCount = 1003;
  const std::vector<std::uint32_t> ranks{3, 1, 2};
  for_all_dtypes([&](auto zero, DType dtype) {
    using T = decltype(zero);
    for (const ReduceOp op : kOps) {
      if (!commlib::is_supported(dtype, op)) continue;
      CAPTURE(static_cast<int>(dtype));
      CAPTURE(static_cast<int>(op));
      const std::size_t wire = commlib::item_bytes(commlib::wire_dtype(dtype, op));
      // Products of six must not overflow in float16.
      Buffers<T> buffers(6, kCount, 1, op == ReduceOp::kProduct ? Kind::kNearOne : Kind::kModerate, 77);
      std::vector<std::vector<std::byte>> partials;
      std::size_t first = 0;
      for (const std::uint32_t local : ranks) {
        partials.emplace_back(kCount * wire + 1);
        commlib::reduce_host(dtype, op, partials.back().data() + 1, buffers.sources() + first, local, kCount);
        first += local;
      }
      std::vector<const void*> sources;
      for (const auto& partial : partials) sources.push_back(partial.data() + 1);
      std::vector<std::byte> result(kCount * sizeof(T));
      commlib::reduce_owner(dtype, op, result.data(), sources.data(), ranks.data(), ranks.size(), kCount);
      // The result may lie where a partial lay, even a wider one.
      for (std::size_t host = 0; host < ranks.size(); ++host) {
        auto copies = partials;
        std::vector<const void*> copied_sources;
        for (const auto& partial : copies) copied_sources.push_back(partial.data() + 1);
        std::byte* const in_place = copies[host].data() + 1;
        commlib::reduce_owner(dtype, op, in_place, copied_sources.data(), ranks.data(), ranks.size(), kCount);
        CHECK(std::memcmp(in_place, result.data(), result.size()) == 0);
      }
      int wrong = 0;
      for (std::size_t i = 0; i < kCount; ++i) {
        const T got = element<T>(result.data(), i);
        const auto inputs = buffers.inputs_at(i);
        if constexpr (kIsHalf<T> || std::is_floating_point_v<T>) {
          // Two roundings on the way, so compared with a double, to a few units of the largest partial result.
          const auto value = [](T x) {
            if constexpr (kIsHalf<T>)
              return static_cast<double>(x.number());
            else
              return static_cast<double>(x);
          };
          double sum = value(inputs[0]);
          double largest = std::abs(sum);
          for (std::size_t k = 1; k < inputs.size(); ++k) {
            sum = combine(op, sum, value(inputs[k]));
            largest = op == ReduceOp::kProduct ? std::abs(sum) : largest + std::abs(value(inputs[k]));
          }
          if (op == ReduceOp::kAverage) sum /= 6;
          const double unit = dtype == DType::kFloat16    ? 0x1p-11
                              : dtype == DType::kBfloat16 ? 0x1p-8
                              : dtype == DType::kFloat32  ? 0x1p-24
                                                          : 0x1p-53;
          if (!(std::abs(value(got) - sum) <= 8 * unit * largest + 0x1p-24)) ++wrong;
        } else {
          if (!same(got, reduced(op, inputs))) ++wrong;
        }
      }
      CHECK(wrong == 0);
    }
  });
}

TEST_CASE("the average of the largest float16 on many ranks is that value, through both levels") {
  const std::uint16_t largest = 0x7BFF;
  std::vector<const void*> inputs(8, &largest);
  std::uint16_t mean = 0;
  commlib::reduce_host(DType::kFloat16, ReduceOp::kAverage, &mean, inputs.data(), 8, 1);
  CHECK(mean == largest);
  const std::vector<const void*> partials(4, &mean);
  const std::vector<std::uint32_t> ranks{8, 7, 8, 1};
  std::uint16_t result = 0;
  commlib::reduce_owner(DType::kFloat16, ReduceOp::kAverage, &result, partials.data(), ranks.data(), 4, 1);
  CHECK(result == largest);
}

TEST_CASE("the mean of a host is weighted by its ranks") {
  const std::uint16_t means[] = {0x3C00, 0x4400};  // 1 and 4
  const void* const sources[] = {&means[0], &means[1]};
  const std::uint32_t ranks[] = {2, 1};
  std::uint16_t result = 0;
  commlib::reduce_owner(DType::kFloat16, ReduceOp::kAverage, &result, sources, ranks, 2, 1);
  CHECK(result == 0x4000);  // 2
  const float sums[] = {2, 4};
  const void* const float_sources[] = {&sums[0], &sums[1]};
  float float_result = 0;
  commlib::reduce_owner(DType::kFloat32, ReduceOp::kAverage, &float_result, float_sources, ranks, 2, 1);
  CHECK(float_result == 2);
}

TEST_CASE("the only host of a job gets the average of its own ranks from the owner") {
  const std::uint32_t ranks[] = {3};
  const std::uint16_t mean = 0x3C01;
  const void* source = &mean;
  std::uint16_t half = 0;
  commlib::reduce_owner(DType::kFloat16, ReduceOp::kAverage, &half, &source, ranks, 1, 1);
  CHECK(half == mean);
  const double sum = -7.5;
  source = &sum;
  double result = 0;
  commlib::reduce_owner(DType::kFloat64, ReduceOp::kAverage, &result, &source, ranks, 1, 1);
  CHECK(result == -2.5);
  const std::int64_t wide_sum = -7;
  source = &wide_sum;
  std::int8_t byte = 0;
  commlib::reduce_owner(DType::kInt8, ReduceOp::kAverage, &byte, &source, ranks, 1, 1);
  CHECK(byte == -3);
}

TEST_CASE("the caller's floating-point modes do not change the bits, and are given back") {
  const std::uint32_t before = commlib::float_modes();
  const std::uint32_t flushing = commlib::kIsX86 ? before | 0x8040U : before | 1U << 24;
  const float subnormal = std::numeric_limits<float>::denorm_min();
  const std::uint16_t half_subnormal = 1;
  float sum = 0;
  std::uint16_t half_sum = 0;
  {
    const void* const sources[] = {&subnormal, &subnormal};
    const void* const half_sources[] = {&half_subnormal, &half_subnormal, &half_subnormal};
    commlib::set_float_modes(flushing);
    commlib::reduce_local(DType::kFloat32, ReduceOp::kSum, &sum, sources, 2, 1);
    commlib::reduce_local(DType::kFloat16, ReduceOp::kSum, &half_sum, half_sources, 3, 1);
  }
  const std::uint32_t after = commlib::float_modes();
  commlib::set_float_modes(before);
  CHECK(after == flushing);
  CHECK(std::bit_cast<std::uint32_t>(sum) == 2);
  CHECK(half_sum == 3);
}

TEST_CASE("more than 4 GiB in one call are all reduced" * doctest::skip(kIsTooLargeForThisBuild)) {
  // The same memory again and again, which Max does not mind.
  const Window here(1030);
  const Window there(1030);
  here.fill(0);
  there.fill(50);
  REQUIRE(here.bytes > std::size_t{1} << 32);
  const void* const sources[] = {here.data, there.data};
  commlib::reduce_local(DType::kUint8, ReduceOp::kMax, here.data, sources, 2, here.bytes);
  CHECK(here.last_page()[commlib::page_bytes() - 1] == std::byte{50});
  int wrong = 0;
  for (std::size_t i = 0; i < Window::kTile; ++i) {
    const auto a = static_cast<std::uint8_t>(i % 251);
    const auto b = static_cast<std::uint8_t>(50 + i % 251);
    if (here.data[i] != static_cast<std::byte>(std::max(a, b))) ++wrong;
  }
  CHECK(wrong == 0);
}
