// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <set>

#include "base/errc.hpp"
#include "sched/partition.hpp"

using commlib::Errc;
using commlib::make_key;
using commlib::part_count;
using commlib::part_range;
using commlib::PartRange;

namespace {

constexpr std::uint64_t kMiB = 1 << 20;

template <typename Call>
Errc thrown_by(Call&& call) {
  try {
    (void)call();
  } catch (const commlib::Error& error) {
    return error.code();
  }
  return Errc::kOk;
}

}  // namespace

TEST_CASE("partitions: how many") {
  CHECK(part_count(0, 4 * kMiB) == 1);
  CHECK(part_count(1, 4 * kMiB) == 1);
  CHECK(part_count(4 * kMiB, 4 * kMiB) == 1);
  CHECK(part_count(4 * kMiB + 1, 4 * kMiB) == 2);
  CHECK(part_count(5'000'000'000, 4 * kMiB) == 1193);  // beyond 32 bits
  CHECK(part_count(65536 * kMiB, kMiB) == 65536);
  CHECK(thrown_by([] { return part_count(65536 * kMiB + 1, kMiB); }) == Errc::kUnsupported);
}

TEST_CASE("partitions: the size must be a positive multiple of 64 KiB") {
  for (const std::uint64_t bytes : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{65535}, 4 * kMiB + 64}) {
    CHECK(thrown_by([bytes] { return part_count(100, bytes); }) == Errc::kConfig);
    CHECK(thrown_by([bytes] { return part_range(0, 100, 4, bytes); }) == Errc::kConfig);
  }
  CHECK(thrown_by([] { return part_count(100, 65536); }) == Errc::kOk);
}

TEST_CASE("partitions: they cover a tensor without gap or overlap") {
  for (const std::size_t item : {1, 2, 4, 8}) {
    const std::uint64_t step = 65536 / item;
    for (const std::uint64_t count : {std::uint64_t{0}, std::uint64_t{1}, step - 1, step, step + 1, 5 * step + 77}) {
      const std::uint32_t parts = part_count(count * item, 65536);
      std::uint64_t next = 0;
      for (std::uint32_t part = 0; part < parts; ++part) {
        const PartRange range = part_range(part, count, item, 65536);
        CHECK(range.first == next);
        CHECK(range.count * item <= 65536);
        CHECK((range.count != 0 || count == 0));
        next += range.count;
      }
      CHECK(next == count);
    }
  }
  CHECK(part_range(1192, 1'250'000'000, 4, 4 * kMiB) == PartRange{1'249'902'592, 97'408});
}

TEST_CASE("keys: packed, unpacked, and refused when out of range") {
  const std::uint64_t most = (std::uint64_t{1} << 47) - 1;
  CHECK(make_key(0, 0) == 0);
  CHECK(make_key(1, 2) == 65538);
  CHECK(make_key(most, 65535) == (std::uint64_t{1} << 63) - 1);
  CHECK(commlib::declared_key_of(make_key(most, 65535)) == most);
  CHECK(commlib::part_of(make_key(most, 65535)) == 65535);
  CHECK(commlib::part_of(make_key(77, 3)) == 3);
  CHECK(thrown_by([most] { return make_key(most + 1, 0); }) == Errc::kUnsupported);
  CHECK(thrown_by([] { return make_key(0, 65536); }) == Errc::kUnsupported);
}
