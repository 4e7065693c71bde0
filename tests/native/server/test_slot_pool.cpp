// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "server/slot_pool.hpp"

using commlib::Slot;
using commlib::SlotPool;

TEST_CASE("slots: writable for as much as was asked, aligned, and never shared") {
  std::mt19937_64 random(1);
  SlotPool pool(1 << 20);
  std::vector<std::pair<Slot, std::size_t>> slots;
  for (int step = 0; step < 3000; ++step) {
    if (slots.size() < 40 && random() % 2 == 0) {
      const std::size_t asked = (std::size_t{4} << random() % 18) - random() % 4;
      Slot slot = pool.take(asked);
      REQUIRE(slot);
      REQUIRE(reinterpret_cast<std::uintptr_t>(slot.data()) % (asked > 2048 ? 4096 : 64) == 0);
      std::memset(slot.data(), static_cast<int>(asked % 251), asked);
      slots.emplace_back(std::move(slot), asked);
    } else if (!slots.empty()) {
      const std::size_t i = random() % slots.size();
      const auto& [slot, bytes] = slots[i];
      const auto expected = static_cast<std::byte>(bytes % 251);
      REQUIRE(slot.data()[0] == expected);
      REQUIRE(slot.data()[bytes - 1] == expected);
      slots.erase(slots.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  slots.clear();
  CHECK(pool.used_bytes() == 0);
  CHECK(pool.cached_bytes() <= 1 << 20);
  CHECK(pool.max_used_bytes() > 0);
}

TEST_CASE("slots: a block that was given back is the next to be taken") {
  SlotPool pool(1 << 20);
  Slot slot = pool.take(65536);
  const std::byte* const first = slot.data();
  CHECK(pool.used_bytes() == 65536);
  slot.reset();
  CHECK_FALSE(slot);
  CHECK(pool.used_bytes() == 0);
  CHECK(pool.cached_bytes() == 65536);
  slot = pool.take(40000);
  CHECK(slot.data() == first);
  CHECK(pool.cached_bytes() == 0);
}

TEST_CASE("slots: the cache is bounded") {
  SlotPool pool(100'000);
  std::vector<Slot> slots;
  for (int i = 0; i < 5; ++i) slots.push_back(pool.take(65536));
  CHECK(pool.max_used_bytes() == 5 * 65536);
  slots.clear();
  CHECK(pool.cached_bytes() == 65536);
  SlotPool none(0);
  none.take(64).reset();
  CHECK(none.cached_bytes() == 0);
}

TEST_CASE("slots: moving moves, and nothing of an impossible size is given") {
  SlotPool pool(1 << 20);
  Slot a = pool.take(1);
  const std::byte* const data = a.data();
  Slot b = std::move(a);
  CHECK(b.data() == data);
  CHECK_FALSE(a);  // NOLINT: that it is empty is what is tested
  b = pool.take(2);
  CHECK(b.data() != data);
  CHECK(pool.used_bytes() == 64);
  CHECK_FALSE(pool.take(0));
  CHECK_FALSE(pool.take(SlotPool::kMaxBytes + 1));
  CHECK(pool.take(SlotPool::kMaxBytes));
}
