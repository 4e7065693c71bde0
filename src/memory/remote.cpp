// SPDX-License-Identifier: Apache-2.0
#include "memory/remote.hpp"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>

namespace commlib {

namespace {

using Call = ssize_t (*)(pid_t, const iovec*, unsigned long, const iovec*, unsigned long, unsigned long);

Errc code_of(int os_error) noexcept {
  switch (os_error) {
    case ESRCH:
      return Errc::kPeerLost;
    case EPERM:
    case ENOSYS:
      return Errc::kUnsupported;
    case ENOMEM:
      return Errc::kOutOfMemory;
    default:
      return Errc::kInternal;
  }
}

// The kernel moves at most about 2 GiB a call, and stops early at a fault, which the next call then reports.
Errc transfer(Call call, pid_t pid, std::uint64_t local, std::uint64_t remote, std::size_t bytes) noexcept {
  constexpr std::size_t kMostBytes = std::size_t{1} << 30;
  while (bytes > 0) {
    const std::size_t piece = std::min(bytes, kMostBytes);
    const iovec here{reinterpret_cast<void*>(local), piece};
    const iovec there{reinterpret_cast<void*>(remote), piece};
    const ssize_t moved = call(pid, &here, 1, &there, 1, 0);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return code_of(errno);
    if (moved == 0) return Errc::kInternal;
    local += static_cast<std::uint64_t>(moved);
    remote += static_cast<std::uint64_t>(moved);
    bytes -= static_cast<std::size_t>(moved);
  }
  return Errc::kOk;
}

}  // namespace

Errc remote_read(pid_t pid, void* destination, std::uint64_t source, std::size_t bytes) noexcept {
  return transfer(::process_vm_readv, pid, reinterpret_cast<std::uint64_t>(destination), source, bytes);
}

Errc remote_write(pid_t pid, std::uint64_t destination, const void* source, std::size_t bytes) noexcept {
  return transfer(::process_vm_writev, pid, reinterpret_cast<std::uint64_t>(source), destination, bytes);
}

}  // namespace commlib
