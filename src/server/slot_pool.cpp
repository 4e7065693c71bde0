// SPDX-License-Identifier: Apache-2.0
#include "server/slot_pool.hpp"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <new>

// Under AddressSanitizer, blocks in the cache and the unused ends of blocks in use are poisoned, so that reuse hides
// nothing.
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes) (static_cast<void>(address), static_cast<void>(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes) (static_cast<void>(address), static_cast<void>(bytes))
#endif

namespace commlib {

namespace {

constexpr std::size_t kPageBytes = 4096;
constexpr std::size_t kLineBytes = 64;

}  // namespace

SlotPool::~SlotPool() {
  for (std::uint32_t size_class = 0; size_class < kClasses; ++size_class) {
    while (FreeBlock* block = free_[size_class]) {
      ASAN_UNPOISON_MEMORY_REGION(block, class_bytes(size_class));
      free_[size_class] = block->next;
      std::free(block);
    }
  }
}

Slot SlotPool::take(std::size_t bytes) noexcept {
  if (bytes == 0 || bytes > kMaxBytes) return {};
  const std::size_t rounded = std::max(std::bit_ceil(bytes), std::size_t{1} << kSmallestShift);
  const auto size_class = static_cast<std::uint32_t>(std::countr_zero(rounded)) - kSmallestShift;
  void* data = free_[size_class];
  if (data != nullptr) {
    ASAN_UNPOISON_MEMORY_REGION(data, rounded);
    free_[size_class] = free_[size_class]->next;
    cached_bytes_ -= rounded;
  } else {
    data = std::aligned_alloc(rounded >= kPageBytes ? kPageBytes : kLineBytes, rounded);
    if (data == nullptr) return {};
  }
  ASAN_POISON_MEMORY_REGION(static_cast<std::byte*>(data) + bytes, rounded - bytes);
  used_bytes_ += rounded;
  max_used_bytes_ = std::max(max_used_bytes_, used_bytes_);
  return {this, static_cast<std::byte*>(data), size_class};
}

void SlotPool::give_back(std::byte* data, std::uint32_t size_class) noexcept {
  const std::size_t bytes = class_bytes(size_class);
  ASAN_UNPOISON_MEMORY_REGION(data, bytes);
  used_bytes_ -= bytes;
  if (cached_bytes_ + bytes > cache_limit_bytes_) {
    std::free(data);
    return;
  }
  auto* block = new (data) FreeBlock{free_[size_class]};
  free_[size_class] = block;
  cached_bytes_ += bytes;
  ASAN_POISON_MEMORY_REGION(data, bytes);
}

}  // namespace commlib
