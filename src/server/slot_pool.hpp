// SPDX-License-Identifier: Apache-2.0
// Memory into which pieces are received and in which they are summed. Blocks are reused: after the first rounds of a
// training loop nothing is asked of the system any more, and no page is touched for the first time.
//
// Owned by one loop and used on its thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace commlib {

class SlotPool;

// A block of a pool, or nothing. Gives the block back when it is destroyed; the pool must outlive it.
class Slot {
 public:
  Slot() = default;
  Slot(Slot&& other) noexcept { swap(other); }
  Slot& operator=(Slot&& other) noexcept {
    Slot(std::move(other)).swap(*this);
    return *this;
  }
  ~Slot();

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] explicit operator bool() const noexcept { return data_ != nullptr; }
  void reset() noexcept { *this = Slot(); }

 private:
  friend class SlotPool;
  Slot(SlotPool* pool, std::byte* data, std::uint32_t size_class) noexcept
      : pool_(pool), data_(data), size_class_(size_class) {}
  void swap(Slot& other) noexcept {
    std::swap(pool_, other.pool_);
    std::swap(data_, other.data_);
    std::swap(size_class_, other.size_class_);
  }

  SlotPool* pool_ = nullptr;
  std::byte* data_ = nullptr;
  std::uint32_t size_class_ = 0;
};

class SlotPool {
 public:
  static constexpr std::size_t kMaxBytes = 512 * 1024;

  // Keeps at most `cache_bytes` of unused blocks.
  explicit SlotPool(std::uint64_t cache_bytes) : cache_limit_bytes_(cache_bytes) {}
  ~SlotPool();
  SlotPool(const SlotPool&) = delete;
  SlotPool& operator=(const SlotPool&) = delete;

  // A block for `bytes` in 1 … kMaxBytes, its contents undefined; an empty Slot if there is no memory.
  [[nodiscard]] Slot take(std::size_t bytes) noexcept;

  [[nodiscard]] std::uint64_t used_bytes() const noexcept { return used_bytes_; }  // in Slots now
  [[nodiscard]] std::uint64_t max_used_bytes() const noexcept { return max_used_bytes_; }
  [[nodiscard]] std::uint64_t cached_bytes() const noexcept { return cached_bytes_; }  // free for the next take

 private:
  friend class Slot;
  static constexpr std::uint32_t kSmallestShift = 6;  // 64 bytes
  static constexpr std::uint32_t kClasses = 14;       // 64 B, 128 B, … 512 KiB
  struct FreeBlock {
    FreeBlock* next;
  };

  [[nodiscard]] static constexpr std::size_t class_bytes(std::uint32_t size_class) noexcept {
    return std::size_t{1} << (kSmallestShift + size_class);
  }
  void give_back(std::byte* data, std::uint32_t size_class) noexcept;

  std::uint64_t cache_limit_bytes_;
  std::uint64_t used_bytes_ = 0;
  std::uint64_t max_used_bytes_ = 0;
  std::uint64_t cached_bytes_ = 0;
  FreeBlock* free_[kClasses] = {};  // last in, first out: the warmest block is taken first
};

inline Slot::~Slot() {
  if (data_ != nullptr) pool_->give_back(data_, size_class_);
}

}  // namespace commlib
