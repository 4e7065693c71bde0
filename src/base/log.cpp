// SPDX-License-Identifier: Apache-2.0
#include "base/log.hpp"

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <ctime>

namespace commlib {

namespace {

std::int64_t unix_now_ns() noexcept {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

// Copies with a terminator. A cut goes before the first byte of a UTF-8 character, so that the text can be decoded.
void copy_cut(char* to, std::size_t capacity, const char* text) noexcept {
  std::size_t length = ::strnlen(text, capacity);
  if (length == capacity) {
    --length;
    while (length > 0 && (static_cast<unsigned char>(text[length]) & 0xC0) == 0x80) --length;
  }
  std::memcpy(to, text, length);
  to[length] = '\0';
}

}  // namespace

LogBuffer::LogBuffer(LogLevel least, std::size_t capacity) : least_(least), records_(capacity < 1 ? 1 : capacity) {}

void LogBuffer::push(LogLevel level, const char* text) noexcept {
  if (!is_wanted(level)) return;
  const std::int64_t now = unix_now_ns();
  const std::lock_guard lock(mutex_);
  if (count_ == records_.size()) {
    first_ = (first_ + 1) % records_.size();
    --count_;
    ++dropped_;
  }
  LogRecord& record = records_[(first_ + count_) % records_.size()];
  record.level = level;
  record.unix_ns = now;
  copy_cut(record.text, sizeof record.text, text);
  ++count_;
}

void LogBuffer::push_format(LogLevel level, const char* format, ...) noexcept {
  char text[sizeof(LogRecord::text) + 4];  // longer than what is kept, so that `push` does the cutting
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  push(level, text);
}

bool LogBuffer::take(LogRecord* record) noexcept {
  const std::lock_guard lock(mutex_);
  if (count_ == 0) return false;
  *record = records_[first_];
  first_ = (first_ + 1) % records_.size();
  --count_;
  return true;
}

std::uint64_t LogBuffer::take_dropped() noexcept {
  const std::lock_guard lock(mutex_);
  const std::uint64_t dropped = dropped_;
  dropped_ = 0;
  return dropped;
}

}  // namespace commlib
