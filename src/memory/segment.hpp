// SPDX-License-Identifier: Apache-2.0
// Memory that several processes share: the mapping of a memfd. It has no name, so a crash leaves nothing behind.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/fd.hpp"

namespace commlib {

class Segment {
 public:
  Segment() noexcept = default;  // none: data() is null

  // Maps the first `bytes` of `borrowed`, which is duplicated: the caller keeps, and may close, its own. Sparse files
  // stay sparse. Throws Error, kConfig if the file is shorter than that (a use of the rest would be SIGBUS).
  Segment(int borrowed, std::size_t bytes);

  // A new memfd of `bytes` zeros, none of them resident. Throws Error.
  [[nodiscard]] static Segment create(std::size_t bytes);

  ~Segment();
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] int descriptor() const noexcept { return fd_.get(); }  // stays the segment's

  // Gives the whole pages inside the range back to the system, in all processes; they read as zeros afterwards. False
  // if the system would not (then nothing has changed).
  bool punch(std::size_t offset, std::size_t bytes) const noexcept;

  // Asks for huge pages, which the system grants or not (/sys/kernel/mm/transparent_hugepage/shmem_enabled).
  void advise_huge_pages() const noexcept;

 private:
  Segment(Fd fd, std::size_t bytes);

  Fd fd_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

[[nodiscard]] std::size_t page_bytes() noexcept;

}  // namespace commlib
