// SPDX-License-Identifier: Apache-2.0
#include "memory/segment.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

#include "base/errc.hpp"

namespace commlib {

std::size_t page_bytes() noexcept {
  static const auto bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

Segment::Segment(int borrowed, std::size_t bytes) : Segment(Fd::duplicate(borrowed), bytes) {}

Segment::Segment(Fd fd, std::size_t bytes) : fd_(std::move(fd)), bytes_(bytes) {
  if (!fd_.is_valid()) throw_os_error("cannot duplicate the descriptor of a segment", errno);
  struct stat status{};
  if (::fstat(fd_.get(), &status) != 0) throw_os_error("fstat of a segment", errno);
  if (static_cast<std::uint64_t>(status.st_size) < bytes) {
    throw Error(Errc::kConfig, "a segment of " + std::to_string(bytes) + " bytes was announced, but its file has " +
                                   std::to_string(status.st_size));
  }
  if (bytes == 0) return;  // mmap refuses that
  void* const mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_.get(), 0);
  if (mapped == MAP_FAILED) throw_os_error("cannot map a segment of " + std::to_string(bytes) + " bytes", errno);
  data_ = static_cast<std::byte*>(mapped);
}

Segment Segment::create(std::size_t bytes) {
  Fd fd(::memfd_create("commlib", MFD_CLOEXEC));
  if (!fd.is_valid()) throw_os_error("memfd_create", errno);
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    throw_os_error("cannot make a segment of " + std::to_string(bytes) + " bytes", errno);
  }
  return Segment(std::move(fd), bytes);
}

Segment::~Segment() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

Segment::Segment(Segment&& other) noexcept
    : fd_(std::move(other.fd_)), data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Segment& Segment::operator=(Segment&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

bool Segment::punch(std::size_t offset, std::size_t bytes) const noexcept {
  const std::size_t page = page_bytes();
  const std::size_t begin = (offset + page - 1) / page * page;
  const std::size_t end = (offset + bytes) / page * page;
  if (begin >= end) return true;
  int failed = 0;
  do {
    failed = ::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(begin),
                         static_cast<off_t>(end - begin));
  } while (failed != 0 && errno == EINTR);
  return failed == 0;
}

void Segment::advise_huge_pages() const noexcept {
  if (data_ != nullptr) ::madvise(data_, bytes_, MADV_HUGEPAGE);  // a wish: refused on kernels without them
}

}  // namespace commlib
