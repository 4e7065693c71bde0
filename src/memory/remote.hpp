// SPDX-License-Identifier: Apache-2.0
// The memory of another process of the same user, addressed as that process addresses it.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

#include "base/errc.hpp"

namespace commlib {

// Both copy all `bytes` or fail; after a failure the destination is undefined. They block for the time of the copy.
// `pid` must be known to be still the process that was meant (a pidfd). kPeerLost: no such process. kUnsupported: not
// permitted here, or unknown to the kernel. kInternal: memory that is not there. kOutOfMemory.
[[nodiscard]] Errc remote_read(pid_t pid, void* destination, std::uint64_t source, std::size_t bytes) noexcept;
[[nodiscard]] Errc remote_write(pid_t pid, std::uint64_t destination, const void* source, std::size_t bytes) noexcept;

}  // namespace commlib
