// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "base/errc.hpp"
#include "memory/segment.hpp"

using commlib::Errc;
using commlib::Error;
using commlib::Segment;

namespace {

std::size_t resident_bytes(const Segment& segment) {
  struct stat status{};
  REQUIRE(::fstat(segment.descriptor(), &status) == 0);
  return static_cast<std::size_t>(status.st_blocks) * 512;
}

}  // namespace

TEST_CASE("a new segment is zero, not resident, and closed on exec") {
  const Segment segment = Segment::create(std::size_t{1} << 40);  // far more than there is
  REQUIRE(segment.data() != nullptr);
  CHECK(segment.bytes() == std::size_t{1} << 40);
  CHECK(resident_bytes(segment) == 0);
  segment.data()[segment.bytes() - 1] = std::byte{7};
  CHECK(segment.data()[segment.bytes() - 2] == std::byte{0});
  CHECK(resident_bytes(segment) <= std::size_t{4} << 20);  // one page, which may be a huge one
  CHECK((::fcntl(segment.descriptor(), F_GETFD) & FD_CLOEXEC) != 0);
}

TEST_CASE("two mappings of one descriptor are the same memory, and each keeps its own descriptor") {
  Segment first = Segment::create(100'000);
  const Segment second(first.descriptor(), 100'000);
  CHECK(second.descriptor() != first.descriptor());
  CHECK(second.data() != first.data());
  first.data()[99'999] = std::byte{42};
  CHECK(second.data()[99'999] == std::byte{42});
  first = Segment();
  CHECK(second.data()[99'999] == std::byte{42});
}

TEST_CASE("a segment moves and leaves nothing behind") {
  Segment first = Segment::create(4096);
  std::byte* const data = first.data();
  Segment second(std::move(first));
  CHECK(first.data() == nullptr);  // NOLINT(bugprone-use-after-move)
  CHECK(first.bytes() == 0);
  CHECK(second.data() == data);
  first = std::move(second);
  CHECK(first.data() == data);
  first.data()[0] = std::byte{1};
}

TEST_CASE("a file that is shorter than announced is refused, for using it would be a bus error") {
  const Segment segment = Segment::create(8192);
  try {
    const Segment longer(segment.descriptor(), 8193);
    FAIL_CHECK("no error");
  } catch (const Error& error) {
    CHECK(error.code() == Errc::kConfig);
  }
}

TEST_CASE("a bad descriptor and an impossible size are errors") {
  CHECK_THROWS_AS(Segment(-1, 4096), Error);
  CHECK_THROWS_AS(Segment::create(std::size_t{1} << 62), Error);
}

TEST_CASE("an empty segment is valid") {
  const Segment segment = Segment::create(0);
  CHECK(segment.bytes() == 0);
  CHECK(segment.punch(0, 0));
  segment.advise_huge_pages();
}

TEST_CASE("punching gives back the whole pages inside a range, and only those") {
  const std::size_t page = commlib::page_bytes();
  const Segment segment = Segment::create(16 * page);
  const Segment other(segment.descriptor(), 16 * page);
  std::memset(segment.data(), 1, 16 * page);
  CHECK(resident_bytes(segment) == 16 * page);
  CHECK(segment.punch(2 * page - 1, 3 * page + 2));  // pages 2, 3, 4
  CHECK(resident_bytes(segment) == 13 * page);
  for (std::size_t at = 0; at < 16 * page; at += page / 2) {
    const bool is_punched = at >= 2 * page && at < 5 * page;
    CHECK(other.data()[at] == std::byte{is_punched ? std::uint8_t{0} : std::uint8_t{1}});
  }
  CHECK(resident_bytes(segment) == 16 * page);       // reading has made new pages
  CHECK(segment.punch(8 * page + 1, 2 * page - 2));  // no whole page inside
  CHECK(segment.punch(9 * page + 1, 10));
  CHECK(resident_bytes(segment) == 16 * page);
}
