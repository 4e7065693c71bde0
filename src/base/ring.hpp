// SPDX-License-Identifier: Apache-2.0
// How things cross from one thread to another: a bounded ring for one producer and one consumer, and an inbox for many
// producers. Neither wakes anybody; whoever puts something in calls wake() of the loop behind it.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <mutex>
#include <utility>
#include <vector>

namespace commlib {

// One thread calls try_push, one calls try_pop; neither ever waits. T is default constructible and movable.
template <class T>
class SpscRing {
 public:
  explicit SpscRing(std::size_t least_capacity)
      : slots_(std::bit_ceil(least_capacity < 1 ? std::size_t{1} : least_capacity)), mask_(slots_.size() - 1) {}

  [[nodiscard]] std::size_t capacity() const noexcept { return slots_.size(); }

  // False when full; `value` is then untouched.
  [[nodiscard]] bool try_push(T&& value) noexcept {
    const std::size_t tail = tail_.load(std::memory_order_relaxed);  // only this thread writes it
    if (tail - seen_head_ == slots_.size()) {
      seen_head_ = head_.load(std::memory_order_acquire);  // acquire: the consumer is done with the slots before it
      if (tail - seen_head_ == slots_.size()) return false;
    }
    slots_[tail & mask_] = std::move(value);
    tail_.store(tail + 1, std::memory_order_release);  // publishes the slot
    return true;
  }

  // False when empty.
  [[nodiscard]] bool try_pop(T* value) noexcept {
    const std::size_t head = head_.load(std::memory_order_relaxed);  // only this thread writes it
    if (head == seen_tail_) {
      seen_tail_ = tail_.load(std::memory_order_acquire);  // acquire: the slots before it are written
      if (head == seen_tail_) return false;
    }
    *value = std::move(slots_[head & mask_]);
    head_.store(head + 1, std::memory_order_release);  // gives the slot back
    return true;
  }

 private:
  std::vector<T> slots_;
  const std::size_t mask_;
  // Each side keeps what it writes and what it remembers of the other side on a cache line of its own.
  alignas(64) std::atomic<std::size_t> tail_{0};
  std::size_t seen_head_ = 0;
  alignas(64) std::atomic<std::size_t> head_{0};
  std::size_t seen_tail_ = 0;
};

// Any thread pushes; one thread drains all at once. Keeps the order in which things were pushed.
template <class T>
class Inbox {
 public:
  // True if it was empty: who drains it has to be woken only then. May throw std::bad_alloc, and has then taken nothing.
  bool push(T value) {
    const std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(value));
    has_any_.store(true, std::memory_order_release);  // is_empty is asked without the lock
    return waiting_.size() == 1;
  }

  // Replaces what is in `*out` by what has come in. The two vectors are exchanged, so a vector that is used again and
  // again is soon large enough and nothing is allocated any more.
  void drain(std::vector<T>* out) noexcept {
    out->clear();
    if (is_empty()) return;
    const std::lock_guard lock(mutex_);
    waiting_.swap(*out);
    has_any_.store(false, std::memory_order_relaxed);  // under the lock, as every write of it
  }

  [[nodiscard]] bool is_empty() const noexcept { return !has_any_.load(std::memory_order_acquire); }

 private:
  std::mutex mutex_;  // guards waiting_; innermost, nothing is called with it held
  std::vector<T> waiting_;
  std::atomic<bool> has_any_{false};
};

}  // namespace commlib
