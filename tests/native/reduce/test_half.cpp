// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/simd.hpp"
#include "reduce/half.hpp"

using commlib::DType;
using commlib::ReduceOp;

namespace {

// A 16-bit float format, decoded by its definition.
struct Format {
  DType dtype;
  int exponent_bits;
  int mantissa_bits;

  [[nodiscard]] double decode(std::uint32_t bits) const {
    const double sign = (bits >> 15 & 1) != 0 ? -1 : 1;
    const int exponent = static_cast<int>(bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
    const double mantissa = static_cast<double>(bits & ((1U << mantissa_bits) - 1)) / (1 << mantissa_bits);
    const int bias = (1 << (exponent_bits - 1)) - 1;
    if (exponent == 2 * bias + 1) {
      return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
    }
    return sign * (exponent == 0 ? std::ldexp(mantissa, 1 - bias) : std::ldexp(1 + mantissa, exponent - bias));
  }
  [[nodiscard]] std::uint32_t infinity() const { return ((1U << exponent_bits) - 1) << mantissa_bits; }
};

constexpr Format kFloat16{DType::kFloat16, 5, 10};
constexpr Format kBfloat16{DType::kBfloat16, 8, 7};

const bool kIsWide = commlib::WideHalfChunk::is_supported();

// The widths of registers that there are here.
std::vector<bool> widths() { return kIsWide ? std::vector<bool>{false, true} : std::vector<bool>{false}; }

std::vector<float> widened(DType dtype, const std::vector<std::uint16_t>& from, bool wide = kIsWide) {
  std::vector<float> to(from.size());
  commlib::widen(dtype, to.data(), from.data(), from.size(), wide);
  return to;
}

std::vector<std::uint16_t> narrowed(DType dtype, const std::vector<float>& from, bool wide = kIsWide) {
  std::vector<std::uint16_t> to(from.size());
  commlib::narrow(dtype, to.data(), from.data(), from.size(), wide);
  return to;
}

std::vector<std::uint16_t> all_16_bits() {
  std::vector<std::uint16_t> all(65536);
  for (std::uint32_t i = 0; i < 65536; ++i) all[i] = static_cast<std::uint16_t>(i);
  return all;
}

std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }

// Floats of all kinds, with all bits in play.
std::vector<float> random_floats(std::size_t count) {
  std::mt19937 random(7);
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    const auto bits = static_cast<std::uint32_t>(random());
    // Every other one in the range of float16, where the rounding happens.
    values[i] = i % 2 == 0 ? std::bit_cast<float>(bits)
                           : std::ldexp(static_cast<float>(bits) - 0x1p31F, -31 - static_cast<int>(random() % 28) + 17);
  }
  return values;
}

}  // namespace

TEST_CASE("all 65,536 values of both formats widen to what they mean") {
  for (const Format& format : {kFloat16, kBfloat16}) {
    const auto all = all_16_bits();
    const auto values = widened(format.dtype, all);
    int wrong = 0;
    for (std::uint32_t i = 0; i < 65536; ++i) {
      const double expected = format.decode(i);
      const bool same = std::isnan(expected) ? std::isnan(values[i])
                                             : static_cast<double>(values[i]) == expected &&
                                                   std::signbit(values[i]) == ((i & 0x8000) != 0);
      if (!same) ++wrong;
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("all values come back from float32 unchanged, and every NaN as the same quiet one") {
  for (const Format& format : {kFloat16, kBfloat16}) {
    const auto all = all_16_bits();
    const auto back = narrowed(format.dtype, widened(format.dtype, all));
    const std::uint32_t one_nan = format.infinity() | 1U << (format.mantissa_bits - 1);
    int wrong = 0;
    for (std::uint32_t i = 0; i < 65536; ++i) {
      const bool is_nan = (i & 0x7FFF) > format.infinity();
      if (back[i] != (is_nan ? one_nan : i)) ++wrong;
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("narrowing rounds to the nearest value, ties to even, up to infinity") {
  for (const Format& format : {kFloat16, kBfloat16}) {
    std::vector<float> values;
    std::vector<std::uint16_t> expected;
    const auto expect = [&](float value, std::uint32_t bits) {
      values.push_back(value);
      expected.push_back(static_cast<std::uint16_t>(bits));
      values.push_back(-value);
      expected.push_back(static_cast<std::uint16_t>(bits | 0x8000));
    };
    const float infinity = std::numeric_limits<float>::infinity();
    for (std::uint32_t low = 0; low < format.infinity(); ++low) {
      const std::uint32_t high = low + 1;
      const double low_value = format.decode(low);
      // Beyond the largest value the next one would be 2^(largest exponent + 1), and counts as infinity.
      const double high_value =
          high == format.infinity() ? 2 * low_value - format.decode(low - 1) : format.decode(high);
      const double middle = (low_value + high_value) / 2;
      if (middle != static_cast<double>(static_cast<float>(middle))) continue;  // half of the least float32
      const auto middle_float = static_cast<float>(middle);
      expect(middle_float, low % 2 == 0 ? low : high);
      expect(std::nextafter(middle_float, 0.0F), low);
      expect(std::nextafter(middle_float, infinity), high);
    }
    expect(std::numeric_limits<float>::max(), format.infinity());
    expect(infinity, format.infinity());
    expect(std::numeric_limits<float>::denorm_min(), 0);
    const auto result = narrowed(format.dtype, values);
    int wrong = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (result[i] != expected[i]) ++wrong;
    }
    CHECK(values.size() > 180'000);
    CHECK(wrong == 0);
  }
}

TEST_CASE("a NaN stays a quiet NaN, however small its payload") {
  const std::vector<float> nans{std::bit_cast<float>(0x7F80'0001U), std::bit_cast<float>(0xFF80'0001U),
                                std::bit_cast<float>(0x7FC0'0000U), std::bit_cast<float>(0x7FFF'FFFFU),
                                std::bit_cast<float>(0xFFFF'FFFFU)};
  CHECK(narrowed(DType::kFloat16, nans) == std::vector<std::uint16_t>(5, 0x7E00));
  CHECK(narrowed(DType::kBfloat16, nans) == std::vector<std::uint16_t>(5, 0x7FC0));
}

TEST_CASE("with and without the processor's instructions the bits are the same") {
  if (!commlib::HalfChunk::is_supported()) MESSAGE("this processor has none");
  const auto values = random_floats(2'000'000);
  const auto all = all_16_bits();
  const std::vector<std::uint16_t> reversed(all.rbegin(), all.rend());
  for (const DType dtype : {DType::kFloat16, DType::kBfloat16}) {
    std::vector<float> wide(all.size());
    commlib::widen_portable(dtype, wide.data(), all.data(), all.size());
    std::vector<std::uint16_t> narrow(values.size());
    commlib::narrow_portable(dtype, narrow.data(), values.data(), values.size());
    for (const bool width : widths()) {
      CAPTURE(width);
      const auto helped_wide = widened(dtype, all, width);
      int wrong = 0;
      for (std::size_t i = 0; i < all.size(); ++i) {
        const bool are_nan = std::isnan(wide[i]) && std::isnan(helped_wide[i]);  // of any kind, until they are narrowed
        if (!are_nan && bits_of(wide[i]) != bits_of(helped_wide[i])) ++wrong;
      }
      CHECK(wrong == 0);
      CHECK(narrow == narrowed(dtype, values, width));
    }

    for (const ReduceOp op : {ReduceOp::kAverage, ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
      for (const std::size_t n : {2u, 3u, 5u}) {
        std::vector<std::uint16_t> third(all.begin() + 30'000, all.end());
        third.insert(third.end(), all.begin(), all.begin() + 30'000);
        const void* const sources[] = {all.data(), reversed.data(), third.data(), reversed.data(), all.data()};
        const commlib::Inputs in{sources, n};
        std::vector<std::uint16_t> portable(all.size());
        commlib::combine_half_portable(dtype, op, 3, portable.data(), in, 0, all.size() - 7);
        for (const bool width : widths()) {
          for (const std::size_t others : {0u, 1u, 2u}) {
            CAPTURE(width);
            CAPTURE(others);
            std::vector<std::vector<std::uint16_t>> helped(3, std::vector<std::uint16_t>(all.size()));
            void* const more[] = {helped[1].data(), helped[2].data()};
            commlib::combine_half(dtype, op, 3, {helped[0].data(), more, others}, in, all.size() - 7, width);
            for (std::size_t i = 0; i <= others; ++i) CHECK(portable == helped[i]);
          }
        }
      }
    }
  }
}

TEST_CASE("no element is lost at any length and alignment, and none behind the end is touched") {
  const auto values = random_floats(100);
  for (const Format& format : {kFloat16, kBfloat16}) {
    const auto halves = narrowed(format.dtype, values);
    for (std::size_t length = 0; length <= 70; ++length) {
      for (std::size_t shift = 0; shift < 8; ++shift) {
        const bool width = widths()[shift % widths().size()];
        std::vector<std::byte> bytes(2 * length + shift / 2 + 2, std::byte{0xA5});
        commlib::narrow(format.dtype, bytes.data() + shift / 2, values.data(), length, width);
        REQUIRE(std::memcmp(bytes.data() + shift / 2, halves.data(), 2 * length) == 0);
        REQUIRE(bytes.back() == std::byte{0xA5});
        std::vector<float> wide(length + 1, 42.0F);
        commlib::widen(format.dtype, wide.data(), bytes.data() + shift / 2, length, width);
        for (std::size_t i = 0; i < length; ++i) {
          const float one = format.dtype == DType::kFloat16 ? commlib::Float16{halves[i]}.number()
                                                            : commlib::Bfloat16{halves[i]}.number();
          REQUIRE(bits_of(wide[i]) == bits_of(one));
        }
        REQUIRE(wide.back() == 42.0F);
      }
    }
  }
}
