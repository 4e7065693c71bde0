// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "memory/arena.hpp"

using commlib::Arena;
using commlib::Errc;
using commlib::Segment;

namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

std::size_t resident_bytes(const Segment& segment) {
  struct stat status{};
  REQUIRE(::fstat(segment.descriptor(), &status) == 0);
  return static_cast<std::size_t>(status.st_blocks) * 512;
}

long page_faults() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt + usage.ru_majflt;
}

// Sizes as they occur: many small ones, some of partition size, few large ones.
std::size_t random_size(std::mt19937_64& random) {
  switch (random() % 8) {
    case 0:
      return random() % 3;
    case 1:
      return random() % (8 * kMiB);
    case 2:
      return random() % (512 * 1024);
    default:
      return random() % 5000;
  }
}

}  // namespace

TEST_CASE("pieces are aligned, large ones to pages, and even an empty one is a piece") {
  const Segment segment = Segment::create(64 * kMiB);
  Arena arena(segment, 4096, 60 * kMiB);
  const auto nothing = arena.allocate(0);
  const auto also_nothing = arena.allocate(0);
  CHECK(nothing == 4096);
  CHECK(also_nothing != nothing);
  CHECK(arena.allocated_bytes() == 128);
  const auto small = arena.allocate(65);
  CHECK(small % 64 == 0);
  CHECK(arena.allocated_bytes() == 256);
  const auto large = arena.allocate(64 * 1024 + 1);
  CHECK(large % commlib::page_bytes() == 0);
  CHECK(arena.allocated_bytes() == 256 + 64 * 1024 + commlib::page_bytes());
  CHECK(arena.at(large) == segment.data() + large);
  // The gap before the large one is not lost.
  CHECK(arena.allocate(100) < large);
  for (const auto offset : {nothing, also_nothing, small, large}) CHECK(arena.free(offset) == Errc::kOk);
}

TEST_CASE("a full arena says so, and has the space again when something is freed") {
  const Segment segment = Segment::create(kMiB);
  Arena arena(segment, 0, kMiB);
  CHECK(arena.allocate(kMiB + 1) == Arena::kNoSpace);
  CHECK(arena.allocate(~std::size_t{0}) == Arena::kNoSpace);
  const auto half = arena.allocate(kMiB / 2);
  const auto other_half = arena.allocate(kMiB / 2);
  CHECK(half == 0);
  CHECK(other_half == kMiB / 2);
  CHECK(arena.allocate(0) == Arena::kNoSpace);
  CHECK(arena.free_runs() == 0);
  CHECK(arena.free(half) == Errc::kOk);
  CHECK(arena.allocate(kMiB / 2 + 1) == Arena::kNoSpace);
  CHECK(arena.allocate(kMiB / 2) == half);
}

TEST_CASE("freeing what is not there is an error and does no harm") {
  const Segment segment = Segment::create(kMiB);
  Arena arena(segment, 0, kMiB);
  const auto piece = arena.allocate(1000);
  CHECK(arena.free(piece + 64) == Errc::kInternal);
  CHECK(arena.free(Arena::kNoSpace) == Errc::kInternal);
  CHECK(arena.free(piece) == Errc::kOk);
  CHECK(arena.free(piece) == Errc::kInternal);
  CHECK(arena.free_runs() == 1);
  CHECK(arena.allocated_bytes() == 0);
}

TEST_CASE("an arena must lie in its segment") {
  const Segment segment = Segment::create(kMiB);
  CHECK_THROWS_AS(Arena(segment, 0, kMiB + 1), commlib::Error);
  CHECK_THROWS_AS(Arena(segment, 64, kMiB), commlib::Error);
  CHECK_THROWS_AS(Arena(segment, 32, 64), commlib::Error);
  CHECK_THROWS_AS(Arena(segment, 0, 0), commlib::Error);
}

namespace {

// What an arena should have given away, kept in the simplest way.
class Model {
 public:
  static constexpr std::size_t kBegin = 192;
  static constexpr std::size_t kBytes = 40 * kMiB + 64;

  static bool is_paged(std::size_t bytes) { return bytes >= Arena::kPagedBytes; }
  static std::uint64_t unit(std::size_t bytes) { return is_paged(bytes) ? commlib::page_bytes() : Arena::kAlign; }
  static std::uint64_t round_up(std::uint64_t value, std::uint64_t to) { return (value + to - 1) / to * to; }
  static std::uint64_t rounded(std::size_t bytes) { return round_up(std::max<std::size_t>(bytes, 1), unit(bytes)); }

  // The lowest place where `bytes` fit, by looking at all gaps.
  [[nodiscard]] std::uint64_t lowest_fit(std::size_t bytes) const {
    std::uint64_t gap = kBegin;
    for (auto piece = pieces.begin();; ++piece) {
      const std::uint64_t gap_end = piece == pieces.end() ? kBegin + kBytes : piece->first;
      const std::uint64_t offset = round_up(gap, unit(bytes));
      if (offset + rounded(bytes) <= gap_end) return offset;
      if (piece == pieces.end()) return Arena::kNoSpace;
      gap = piece->first + rounded(piece->second.bytes);
    }
  }

  [[nodiscard]] std::size_t allocated_bytes() const {
    std::size_t sum = 0;
    for (const auto& [offset, piece] : pieces) sum += rounded(piece.bytes);
    return sum;
  }

  [[nodiscard]] std::size_t free_runs() const {
    std::size_t runs = 0;
    std::uint64_t end = kBegin;
    for (const auto& [offset, piece] : pieces) {
      if (offset > end) ++runs;
      end = offset + rounded(piece.bytes);
    }
    return runs + (end < kBegin + kBytes ? 1 : 0);
  }

  struct Piece {
    std::size_t bytes;
    std::uint8_t mark;
  };
  std::map<std::uint64_t, Piece> pieces;
};

bool has_mark(const Arena& arena, std::uint64_t offset, const Model::Piece& piece) {
  const auto* const data = reinterpret_cast<const std::uint8_t*>(arena.at(offset));
  return piece.bytes == 0 || (data[0] == piece.mark && std::memcmp(data, data + 1, piece.bytes - 1) == 0);
}

}  // namespace

TEST_CASE("whatever is allocated and freed, pieces never overlap, the lowest fit is taken, and nothing is lost") {
  for (const std::size_t keep : {std::size_t{0}, 4 * kMiB, Arena::kKeepBytes}) {
    CAPTURE(keep);
    std::mt19937_64 random(keep + 1);
    const Segment segment = Segment::create(64 * kMiB);
    Arena arena(segment, Model::kBegin, Model::kBytes, keep);
    Model model;
    int refused = 0;
    for (int step = 0; step < 3000; ++step) {
      if (random() % 100 < (step % 1000 < 700 ? 65U : 35U)) {  // grows, then shrinks
        const std::size_t bytes = random_size(random);
        const auto offset = arena.allocate(bytes);
        REQUIRE(offset == model.lowest_fit(bytes));
        if (offset == Arena::kNoSpace) {
          ++refused;
          continue;
        }
        const auto mark = static_cast<std::uint8_t>(random() % 255 + 1);
        std::memset(arena.at(offset), mark, bytes);
        model.pieces[offset] = {bytes, mark};
      } else if (!model.pieces.empty()) {
        auto victim = model.pieces.lower_bound(random() % (Model::kBegin + Model::kBytes));
        if (victim == model.pieces.end()) victim = model.pieces.begin();
        // What was written is still there: no neighbour, and no punching, has touched it.
        REQUIRE(has_mark(arena, victim->first, victim->second));
        REQUIRE(arena.free(victim->first) == Errc::kOk);
        model.pieces.erase(victim);
      }
    }
    CHECK(refused > 0);  // it has been full, too
    CHECK(model.pieces.size() > 20);
    CHECK(arena.allocated_bytes() == model.allocated_bytes());
    CHECK(arena.free_runs() == model.free_runs());
    for (const auto& [offset, piece] : model.pieces) {
      REQUIRE(has_mark(arena, offset, piece));
      REQUIRE(arena.free(offset) == Errc::kOk);
    }
    CHECK(arena.free_runs() == 1);
    CHECK(arena.allocated_bytes() == 0);
    CHECK(resident_bytes(segment) <= keep + Arena::kPunchBytes + 2 * commlib::page_bytes());
  }
}

TEST_CASE("freed memory goes back to the system, but for what is kept") {
  const Segment segment = Segment::create(512 * kMiB);
  Arena arena(segment, 0, 512 * kMiB);
  std::vector<std::uint64_t> pieces;
  for (int i = 0; i < 50; ++i) {
    pieces.push_back(arena.allocate(4 * kMiB));
    std::memset(arena.at(pieces.back()), 1, 4 * kMiB);
  }
  CHECK(resident_bytes(segment) == 200 * kMiB);
  for (const auto piece : pieces) CHECK(arena.free(piece) == Errc::kOk);
  CHECK(resident_bytes(segment) <= Arena::kKeepBytes);
  CHECK(resident_bytes(segment) >= Arena::kKeepBytes - 4 * kMiB);
  // One piece larger than all that is kept.
  const auto large = arena.allocate(100 * kMiB);
  std::memset(arena.at(large), 1, 100 * kMiB);
  CHECK(arena.free(large) == Errc::kOk);
  CHECK(resident_bytes(segment) <= Arena::kKeepBytes);
}

TEST_CASE("an arena that keeps nothing gives everything back, whatever the order") {
  const Segment segment = Segment::create(64 * kMiB);
  Arena arena(segment, 64, 63 * kMiB, 0);
  std::vector<std::uint64_t> pieces;
  for (int i = 0; i < 3000; ++i) {
    pieces.push_back(arena.allocate(10'000));
    REQUIRE(pieces.back() != Arena::kNoSpace);
    std::memset(arena.at(pieces.back()), 1, 10'000);
  }
  CHECK(resident_bytes(segment) > 28 * kMiB);
  std::shuffle(pieces.begin(), pieces.end(), std::mt19937_64(5));
  for (const auto piece : pieces) CHECK(arena.free(piece) == Errc::kOk);
  CHECK(arena.free_runs() == 1);
  CHECK(resident_bytes(segment) < Arena::kPunchBytes + 2 * commlib::page_bytes());
}

TEST_CASE("a buffer that is allocated and freed again and again stays resident") {
  const Segment segment = Segment::create(4096 * kMiB);
  Arena arena(segment, 0, 4096 * kMiB);
  // Something that stays, and holes between, as in a program that has run for a while.
  std::vector<std::uint64_t> others;
  for (int i = 0; i < 100; ++i) others.push_back(arena.allocate(100'000));
  for (int i = 0; i < 100; i += 2) CHECK(arena.free(others[static_cast<std::size_t>(i)]) == Errc::kOk);
  const auto use = [&] {
    const auto piece = arena.allocate(4 * kMiB);
    std::memset(arena.at(piece), 1, 4 * kMiB);
    CHECK(arena.free(piece) == Errc::kOk);
  };
  use();
  const long before = page_faults();
  for (int i = 0; i < 100; ++i) use();
  CHECK(page_faults() - before < 1024);  // one round would be 1,024 with pages of 4 KiB
  CHECK(resident_bytes(segment) < 6 * kMiB);
}

TEST_CASE("what is kept is what will be used again: the low end") {
  const Segment segment = Segment::create(256 * kMiB);
  Arena arena(segment, 0, 256 * kMiB, 8 * kMiB);
  const auto low = arena.allocate(8 * kMiB);
  const auto wall = arena.allocate(100);
  const auto high = arena.allocate(8 * kMiB);
  std::memset(arena.at(low), 1, 8 * kMiB);
  std::memset(arena.at(high), 1, 8 * kMiB);
  CHECK(arena.free(low) == Errc::kOk);   // fits into what may be kept
  CHECK(arena.free(high) == Errc::kOk);  // goes
  CHECK(resident_bytes(segment) <= 8 * kMiB + commlib::page_bytes());
  CHECK(*arena.at(low) == std::byte{1});
  CHECK(*arena.at(high + kMiB) == std::byte{0});
  CHECK(arena.allocate(8 * kMiB) == low);
  CHECK(arena.free(wall) == Errc::kOk);
}

TEST_CASE("threads that allocate and free at once, with punching, do not disturb each other") {
  const Segment segment = Segment::create(512 * kMiB);
  Arena arena(segment, 0, 512 * kMiB, 2 * kMiB);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      std::mt19937_64 random(static_cast<std::uint64_t>(i));
      std::vector<std::pair<std::uint64_t, std::size_t>> mine;
      const auto mark = static_cast<std::uint8_t>(i + 1);
      const auto drop = [&] {
        const auto [offset, bytes] = mine.back();
        mine.pop_back();
        const auto* const data = reinterpret_cast<const std::uint8_t*>(arena.at(offset));
        if (data[0] != mark || data[bytes - 1] != mark || data[bytes / 2] != mark) wrong.fetch_add(1);
        if (arena.free(offset) != Errc::kOk) wrong.fetch_add(1);
      };
      for (int step = 0; step < 400; ++step) {
        const std::size_t bytes = 1 + random_size(random);
        const auto offset = arena.allocate(bytes);
        if (offset != Arena::kNoSpace) {
          std::memset(arena.at(offset), mark, bytes);
          mine.emplace_back(offset, bytes);
        }
        if (mine.size() > 1) std::swap(mine[random() % mine.size()], mine.back());
        if (mine.size() > 8) drop();
      }
      while (!mine.empty()) drop();
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong.load() == 0);
  CHECK(arena.free_runs() == 1);
  CHECK(arena.allocated_bytes() == 0);
  CHECK(resident_bytes(segment) <= 3 * kMiB + commlib::page_bytes());
}

TEST_CASE("ten thousand pieces are found and freed quickly") {
  const Segment segment = Segment::create(1024 * kMiB);
  Arena arena(segment, 0, 1024 * kMiB);
  std::vector<std::uint64_t> pieces;
  for (int i = 0; i < 10'000; ++i) pieces.push_back(arena.allocate(1000));
  for (std::size_t i = 0; i < pieces.size(); i += 2) CHECK(arena.free(pieces[i]) == Errc::kOk);
  CHECK(arena.free_runs() == 5001);
  // 5,000 holes that are too small must not be looked at one by one; that would be minutes here.
  std::vector<std::uint64_t> larger;
  for (int i = 0; i < 100'000; ++i) {
    const auto offset = arena.allocate(2000);
    if (offset < pieces.back() || arena.free(offset) != Errc::kOk) FAIL("not behind the holes");
  }
  for (std::size_t i = 1; i < pieces.size(); i += 2) CHECK(arena.free(pieces[i]) == Errc::kOk);
  CHECK(arena.free_runs() == 1);
}
