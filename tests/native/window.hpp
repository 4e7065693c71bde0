// SPDX-License-Identifier: Apache-2.0
// Gigabytes of addresses over a few megabytes of memory, for tests of large sizes: one tile mapped again and again, and
// a last page that occurs once.
#pragma once

#include <doctest/doctest.h>
#include <sys/mman.h>

#include <cstring>

#include "memory/segment.hpp"

class Window {
 public:
  static constexpr std::size_t kTile = std::size_t{4} << 20;

  explicit Window(std::size_t tiles)
      : bytes(tiles * kTile + commlib::page_bytes()),
        last_offset_(tiles * kTile),
        tile_(commlib::Segment::create(kTile)),
        last_(commlib::Segment::create(commlib::page_bytes())) {
    void* const all = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    REQUIRE(all != MAP_FAILED);
    data = static_cast<std::byte*>(all);
    for (std::size_t offset = 0; offset < bytes; offset += kTile) {
      const commlib::Segment& part = offset < last_offset_ ? tile_ : last_;
      REQUIRE(::mmap(data + offset, part.bytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, part.descriptor(),
                     0) == data + offset);
    }
  }
  ~Window() { ::munmap(data, bytes); }
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  // The tile gets a pattern that begins with `seed`, the last page only `seed`s.
  void fill(std::uint8_t seed) const {
    for (std::size_t i = 0; i < kTile; ++i) data[i] = static_cast<std::byte>(seed + i % 251);
    std::memset(last_page(), seed, commlib::page_bytes());
  }

  [[nodiscard]] std::byte* last_page() const { return data + last_offset_; }

  [[nodiscard]] bool operator==(const Window& other) const {
    return std::memcmp(data, other.data, kTile) == 0 &&
           std::memcmp(last_page(), other.last_page(), commlib::page_bytes()) == 0;
  }

  std::byte* data = nullptr;
  const std::size_t bytes;

 private:
  const std::size_t last_offset_;
  commlib::Segment tile_;
  commlib::Segment last_;
};

// ThreadSanitizer would need four times as much real memory. AddressSanitizer watches the widest instructions do it, where there
// are any.
#if defined(__SANITIZE_THREAD__) || (defined(__SANITIZE_ADDRESS__) && !defined(__AVX2__))
inline constexpr bool kIsTooLargeForThisBuild = true;
#else
inline constexpr bool kIsTooLargeForThisBuild = false;
#endif
