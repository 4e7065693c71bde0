// SPDX-License-Identifier: Apache-2.0
// What the core has to say. Nothing is printed here: messages wait in a bounded buffer until Python fetches them and
// gives them to its own logging.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

namespace commlib {

// The numbers of Python's logging.
enum class LogLevel : int { kDebug = 10, kInfo = 20, kWarning = 30, kError = 40 };

struct LogRecord {
  LogLevel level{};
  std::int64_t unix_ns = 0;  // time of day
  char text[496] = {};       // longer messages are cut; never half a UTF-8 character
};

class LogBuffer {
 public:
  // Messages below `least` are not kept.
  explicit LogBuffer(LogLevel least = LogLevel::kInfo, std::size_t capacity = 256);

  [[nodiscard]] bool is_wanted(LogLevel level) const noexcept { return level >= least_; }

  // Any thread; never blocks for longer than a copy. A full buffer loses its oldest message.
  void push(LogLevel level, const char* text) noexcept;
  void push_format(LogLevel level, const char* format, ...) noexcept __attribute__((format(printf, 3, 4)));

  // The oldest message; false if there is none.
  [[nodiscard]] bool take(LogRecord* record) noexcept;

  // How many messages have been lost since this was last asked.
  [[nodiscard]] std::uint64_t take_dropped() noexcept;

 private:
  const LogLevel least_;
  std::mutex mutex_;  // guards all below; innermost, nothing is called with it held
  std::vector<LogRecord> records_;
  std::size_t first_ = 0;
  std::size_t count_ = 0;
  std::uint64_t dropped_ = 0;
};

}  // namespace commlib

// COMMLIB_LOG(buffer, level, format, …): `buffer` is a LogBuffer* and may be null. The arguments are evaluated only
// when the message is wanted.
#define COMMLIB_LOG(buffer, level, ...)                                        \
  do {                                                                         \
    ::commlib::LogBuffer* const commlib_log_buffer = (buffer);                 \
    if (commlib_log_buffer != nullptr && commlib_log_buffer->is_wanted(level)) \
      commlib_log_buffer->push_format((level), __VA_ARGS__);                   \
  } while (false)
