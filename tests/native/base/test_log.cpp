// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <ctime>
#include <string>
#include <thread>
#include <vector>

#include "base/log.hpp"

using commlib::LogBuffer;
using commlib::LogLevel;
using commlib::LogRecord;

namespace {

// Not inlined, for the compiler would warn of the null pointer it sees.
__attribute__((noinline)) void log_if_there(LogBuffer* log, int* evaluated) {
  COMMLIB_LOG(log, LogLevel::kError, "%d", ++*evaluated);
}

}  // namespace

TEST_CASE("messages come out in the order they went in, with level and time of day") {
  LogBuffer log;
  const auto before = std::time(nullptr);
  COMMLIB_LOG(&log, LogLevel::kWarning, "rank %d of %s", 3, "eight");
  COMMLIB_LOG(&log, LogLevel::kError, "plain");
  LogRecord record;
  REQUIRE(log.take(&record));
  CHECK(record.level == LogLevel::kWarning);
  CHECK(std::string(record.text) == "rank 3 of eight");
  CHECK(record.unix_ns / 1'000'000'000 >= before);
  CHECK(record.unix_ns / 1'000'000'000 <= std::time(nullptr));
  REQUIRE(log.take(&record));
  CHECK(record.level == LogLevel::kError);
  CHECK(std::string(record.text) == "plain");
  CHECK_FALSE(log.take(&record));
}

TEST_CASE("a full buffer loses its oldest messages and counts them") {
  LogBuffer log(LogLevel::kInfo, 4);
  for (int i = 0; i < 11; ++i) COMMLIB_LOG(&log, LogLevel::kInfo, "%d", i);
  CHECK(log.take_dropped() == 7);
  CHECK(log.take_dropped() == 0);
  LogRecord record;
  for (int i = 7; i < 11; ++i) {
    REQUIRE(log.take(&record));
    CHECK(std::string(record.text) == std::to_string(i));
  }
  CHECK_FALSE(log.take(&record));
  log.push(LogLevel::kInfo, "afterwards");
  REQUIRE(log.take(&record));
  CHECK(std::string(record.text) == "afterwards");
}

TEST_CASE("unwanted messages are not kept, and their arguments are not evaluated") {
  LogBuffer log(LogLevel::kWarning);
  int evaluated = 0;
  COMMLIB_LOG(&log, LogLevel::kInfo, "%d", ++evaluated);
  log_if_there(nullptr, &evaluated);
  log.push(LogLevel::kDebug, "no");
  LogRecord record;
  CHECK_FALSE(log.take(&record));
  CHECK(evaluated == 0);
  log_if_there(&log, &evaluated);
  CHECK(log.take(&record));
  CHECK(evaluated == 1);
}

TEST_CASE("a long message is cut at its end, and never inside a character") {
  constexpr std::size_t kMost = sizeof(LogRecord::text) - 1;
  LogBuffer log;
  LogRecord record;
  for (std::size_t ahead = kMost - 4; ahead <= kMost + 1; ++ahead) {
    const std::string text = std::string(ahead, 'a') + "\xE2\x82\xAC\xE2\x82\xAC";  // two euro signs, three bytes each
    std::string expected = text;
    for (std::size_t cut : {ahead + 6, ahead + 3, ahead, kMost}) {
      if (expected.size() > kMost) expected = text.substr(0, cut);
    }
    COMMLIB_LOG(&log, LogLevel::kInfo, "%s", text.c_str());
    log.push(LogLevel::kInfo, text.c_str());
    for (int i = 0; i < 2; ++i) {
      REQUIRE(log.take(&record));
      CHECK(std::string(record.text) == expected);
    }
  }
}

TEST_CASE("many threads log at once and nothing is torn or lost without being counted") {
  LogBuffer log(LogLevel::kInfo, 64);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&log, i] {
      const std::string text(100, static_cast<char>('a' + i));
      for (int j = 0; j < 500; ++j) log.push(LogLevel::kInfo, text.c_str());
    });
  }
  std::uint64_t taken = 0;
  LogRecord record;
  const auto take_all = [&] {
    while (log.take(&record)) {
      ++taken;
      const std::string text = record.text;
      CHECK(text == std::string(100, text.at(0)));
    }
  };
  for (int i = 0; i < 100; ++i) take_all();
  for (auto& thread : threads) thread.join();
  take_all();
  CHECK(taken + log.take_dropped() == 2000);
}
