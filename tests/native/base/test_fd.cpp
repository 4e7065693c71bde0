// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <unistd.h>

#include <utility>

#include "base/clock.hpp"
#include "base/cpu.hpp"
#include "base/event_fd.hpp"
#include "base/fd.hpp"

using commlib::EventFd;
using commlib::Fd;

namespace {

bool is_open(int fd) { return ::fcntl(fd, F_GETFD) >= 0; }

bool is_readable(int fd) {
  pollfd poller{fd, POLLIN, 0};
  return ::poll(&poller, 1, 0) == 1;
}

}  // namespace

TEST_CASE("a descriptor is closed by its owner, once, wherever it was moved to") {
  int number = -1;
  {
    Fd first(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    REQUIRE(first.is_valid());
    number = first.get();
    Fd second(std::move(first));
    CHECK_FALSE(first.is_valid());
    first = std::move(second);
    CHECK(first.get() == number);
    CHECK(is_open(number));
  }
  CHECK_FALSE(is_open(number));
}

TEST_CASE("assigning a descriptor closes the one that was there, and releasing closes none") {
  Fd first(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const int old = first.get();
  first = Fd(::open("/dev/zero", O_RDONLY | O_CLOEXEC));
  CHECK(first.is_valid());
  // The old number may not have been used again: it was still open when the new one was opened.
  CHECK(first.get() != old);
  CHECK_FALSE(is_open(old));
  const int released = first.release();
  CHECK_FALSE(first.is_valid());
  CHECK(is_open(released));
  ::close(released);
}

TEST_CASE("a duplicate is closed on exec and lives longer than the original") {
  Fd original(::open("/dev/zero", O_RDONLY));
  const Fd copy = Fd::duplicate(original.get());
  original.reset();
  char byte = 'x';
  CHECK(::read(copy.get(), &byte, 1) == 1);
  CHECK(byte == 0);
  CHECK((::fcntl(copy.get(), F_GETFD) & FD_CLOEXEC) != 0);
  CHECK_FALSE(Fd::duplicate(-1).is_valid());
}

TEST_CASE("an event is readable from signal to drain, however often it was signalled") {
  EventFd event;
  CHECK_FALSE(is_readable(event.descriptor()));
  CHECK_FALSE(event.drain());
  event.signal();
  event.signal();
  CHECK(is_readable(event.descriptor()));
  CHECK(event.drain());
  CHECK_FALSE(is_readable(event.descriptor()));
  CHECK_FALSE(event.drain());
}

TEST_CASE("a closed event takes signals and does nothing") {
  EventFd event;
  event.close();
  event.signal();
  CHECK_FALSE(event.drain());
  CHECK(event.descriptor() == -1);
}

TEST_CASE("the clock does not go back and its units agree") {
  const auto before_ms = commlib::now_ms();
  const auto first = commlib::now_ns();
  const auto second = commlib::now_ns();
  CHECK(first <= second);
  CHECK(before_ms <= first / 1'000'000);
  CHECK(second / 1'000'000 <= commlib::now_ms());
}

TEST_CASE("the CPUs of the affinity mask are those that the kernel lets us run on") {
  const auto cpus = commlib::affinity_cpus();
  REQUIRE_FALSE(cpus.empty());
  for (std::size_t i = 1; i < cpus.size(); ++i) CHECK(cpus[i - 1] < cpus[i]);

  cpu_set_t before;
  REQUIRE(::sched_getaffinity(0, sizeof before, &before) == 0);
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(static_cast<unsigned>(cpus.back()), &one);
  REQUIRE(::sched_setaffinity(0, sizeof one, &one) == 0);
  CHECK(commlib::affinity_cpus() == std::vector<int>{cpus.back()});
  REQUIRE(::sched_setaffinity(0, sizeof before, &before) == 0);
}
