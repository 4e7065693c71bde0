// SPDX-License-Identifier: Apache-2.0
// Operations with known answers: inputs of all ranks, the partials that hosts would push, and the result in long
// double. Inputs are so small that partials and sums are exact in every dtype; only averages are rounded.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "memory/buffer_view.hpp"
#include "reduce/reduce.hpp"

namespace values {

using commlib::DType;
using commlib::ReduceOp;

using Bytes = std::vector<std::byte>;

// Only for values that a 16-bit float holds exactly, and zero.
inline std::uint16_t encode_half(double value) {
  if (value == 0) return 0;
  int exponent = 0;
  const double mantissa = std::frexp(std::fabs(value), &exponent);  // in [0.5, 1)
  const auto bits = static_cast<std::uint16_t>(std::lround((mantissa * 2 - 1) * 1024));
  return static_cast<std::uint16_t>((value < 0 ? 0x8000 : 0) | (exponent - 1 + 15) << 10 | bits);
}

inline double decode_half(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const double mantissa = exponent == 0 ? (bits & 1023) / 1024.0 : 1 + (bits & 1023) / 1024.0;
  return std::ldexp(bits & 0x8000 ? -mantissa : mantissa, std::max(exponent, 1) - 15);
}

inline std::uint16_t encode_bfloat16(double value) {
  const auto narrow = static_cast<float>(value);
  std::uint32_t bits = 0;
  std::memcpy(&bits, &narrow, 4);
  return static_cast<std::uint16_t>(bits >> 16);
}

inline double decode_bfloat16(std::uint16_t bits) {
  const std::uint32_t wide = std::uint32_t{bits} << 16;
  float value = 0;
  std::memcpy(&value, &wide, 4);
  return value;
}

template <typename T>
void put(std::byte* to, T value) {
  std::memcpy(to, &value, sizeof value);
}
template <typename T>
T get(const std::byte* from) {
  T value{};
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline void encode(DType dtype, std::byte* to, double value) {
  switch (dtype) {
    case DType::kBool:
      return put<std::uint8_t>(to, value != 0);
    case DType::kUint8:
      return put(to, static_cast<std::uint8_t>(static_cast<std::int64_t>(value)));
    case DType::kInt8:
      return put(to, static_cast<std::int8_t>(static_cast<std::int64_t>(value)));
    case DType::kInt16:
      return put(to, static_cast<std::int16_t>(static_cast<std::int64_t>(value)));
    case DType::kInt32:
      return put(to, static_cast<std::int32_t>(value));
    case DType::kInt64:
      return put(to, static_cast<std::int64_t>(value));
    case DType::kFloat16:
      return put(to, encode_half(value));
    case DType::kBfloat16:
      return put(to, encode_bfloat16(value));
    case DType::kFloat32:
      return put(to, static_cast<float>(value));
    case DType::kFloat64:
      return put(to, value);
  }
}

inline double decode(DType dtype, const std::byte* from) {
  switch (dtype) {
    case DType::kBool:
    case DType::kUint8:
      return get<std::uint8_t>(from);
    case DType::kInt8:
      return get<std::int8_t>(from);
    case DType::kInt16:
      return get<std::int16_t>(from);
    case DType::kInt32:
      return get<std::int32_t>(from);
    case DType::kInt64:
      return static_cast<double>(get<std::int64_t>(from));
    case DType::kFloat16:
      return decode_half(get<std::uint16_t>(from));
    case DType::kBfloat16:
      return decode_bfloat16(get<std::uint16_t>(from));
    case DType::kFloat32:
      return get<float>(from);
    case DType::kFloat64:
      return get<double>(from);
  }
  return 0;
}

inline long double combine(DType dtype, ReduceOp op, long double a, long double b) {
  switch (op) {
    case ReduceOp::kMin:
      return std::min(a, b);
    case ReduceOp::kMax:
      return std::max(a, b);
    case ReduceOp::kProduct:
      return a * b;
    default:
      return dtype == DType::kBool ? std::max(a, b) : a + b;
  }
}

// The distance a correctly rounded average may have from the true one, relative to it.
inline double tolerance(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return std::ldexp(1.001, -11);
    case DType::kBfloat16:
      return std::ldexp(1.001, -8);
    case DType::kFloat32:
      return std::ldexp(1.001, -24);
    case DType::kFloat64:
      return std::ldexp(1.001, -53);
    default:
      return 0;
  }
}

// Inputs repeat after so many elements, a prime: that saves most of the work, and a shift of pieces still shows.
constexpr std::size_t kPeriod = 1021;

struct Truth {
  std::vector<Bytes> partials;       // of each host, wire_dtype
  std::vector<long double> results;  // of the first kPeriod elements
};

inline Truth make_truth(DType dtype, ReduceOp op, std::size_t count, const std::vector<std::uint32_t>& ranks,
                        std::mt19937_64& random) {
  const DType wire = commlib::wire_dtype(dtype, op);
  const bool is_signed = dtype != DType::kBool && dtype != DType::kUint8;
  const bool is_half_mean = op == ReduceOp::kAverage && (dtype == DType::kFloat16 || dtype == DType::kBfloat16);
  const auto input = [&]() -> long double {
    if (dtype == DType::kBool) return static_cast<long double>(random() % 2);
    const auto magnitude = static_cast<long double>(op == ReduceOp::kProduct ? 1 + random() % 2 : random() % 7);
    return is_signed && random() % 2 == 0 ? -magnitude : magnitude;
  };
  Truth truth;
  truth.partials.assign(ranks.size(), Bytes(count * commlib::item_bytes(wire)));
  long double all_ranks = 0;
  for (const std::uint32_t number : ranks) all_ranks += number;
  for (std::size_t i = 0; i < std::min(count, kPeriod); ++i) {
    long double total = 0;
    for (std::size_t host = 0; host < ranks.size(); ++host) {
      long double partial = input();
      // The mean of equal inputs is exact.
      for (std::uint32_t rank = 1; rank < ranks[host]; ++rank) {
        partial = combine(dtype, op, partial, is_half_mean ? partial / rank : input());
      }
      total = host == 0 ? partial : combine(dtype, op, total, partial);
      if (is_half_mean) partial /= ranks[host];
      encode(wire, truth.partials[host].data() + i * commlib::item_bytes(wire), static_cast<double>(partial));
    }
    if (op == ReduceOp::kAverage) total /= all_ranks;
    truth.results.push_back(op == ReduceOp::kAverage && commlib::is_integer(dtype) ? std::floor(total) : total);
  }
  for (Bytes& partial : truth.partials) {
    const std::size_t period = kPeriod * commlib::item_bytes(wire);
    for (std::size_t at = period; at < partial.size(); at += period) {
      std::memcpy(partial.data() + at, partial.data(), std::min(period, partial.size() - at));
    }
  }
  return truth;
}

// Whether `result` is right for an operation of `count` elements.
inline bool is_right(DType dtype, ReduceOp op, std::size_t count, const Bytes& result,
                     const std::vector<long double>& truth) {
  const std::size_t item = commlib::item_bytes(dtype);
  if (result.size() != count * item) return false;
  for (std::size_t i = 0; i < truth.size(); ++i) {
    const double got = decode(dtype, result.data() + i * item);
    Bytes wrapped(8);
    encode(dtype, wrapped.data(), static_cast<double>(truth[i]));  // integers wrap
    const long double expected = commlib::is_integer(dtype) ? decode(dtype, wrapped.data()) : truth[i];
    const long double allowed = op == ReduceOp::kAverage ? tolerance(dtype) * std::fabs(expected) : 0;
    if (!(std::fabs(got - expected) <= allowed)) return false;
  }
  const std::size_t period = kPeriod * item;
  for (std::size_t at = period; at < result.size(); at += period) {
    if (std::memcmp(result.data() + at, result.data(), std::min(period, result.size() - at)) != 0) return false;
  }
  return true;
}

}  // namespace values
