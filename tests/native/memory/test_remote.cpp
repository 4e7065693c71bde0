// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <numeric>
#include <vector>

#include "memory/remote.hpp"
#include "memory/segment.hpp"
#include "window.hpp"

using commlib::Errc;
using commlib::remote_read;
using commlib::remote_write;

namespace {

std::uint64_t address(const void* pointer) { return reinterpret_cast<std::uint64_t>(pointer); }

// A child that does nothing until it is killed.
class IdleChild {
 public:
  IdleChild() : pid(::fork()) {
    REQUIRE(pid >= 0);
    if (pid == 0) {
      for (;;) ::pause();
    }
  }
  ~IdleChild() { kill(); }
  IdleChild(const IdleChild&) = delete;
  IdleChild& operator=(const IdleChild&) = delete;

  void kill() {
    if (is_dead) return;
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
    is_dead = true;
  }

  const pid_t pid;
  bool is_dead = false;
};

// Containers may forbid it altogether, which is an ordinary answer; then there is nothing more to test.
bool is_permitted(pid_t pid, const void* there) {
  char byte = 0;
  const Errc code = remote_read(pid, &byte, address(there), 1);
  if (code == Errc::kUnsupported) MESSAGE("process_vm_readv is not permitted here");
  return code != Errc::kUnsupported;
}

}  // namespace

TEST_CASE("another process's memory can be read and written, at any alignment") {
  std::vector<std::uint8_t> data(300'001);
  std::iota(data.begin(), data.end(), std::uint8_t{0});
  const std::vector<std::uint8_t> original = data;
  const IdleChild child;  // has a copy of `data` at the same address
  if (!is_permitted(child.pid, data.data())) return;
  std::fill(data.begin(), data.end(), std::uint8_t{9});
  std::vector<std::uint8_t> got(data.size());
  CHECK(remote_read(child.pid, got.data(), address(data.data()), got.size()) == Errc::kOk);
  CHECK(got == original);
  CHECK(remote_write(child.pid, address(data.data() + 1), got.data() + 3, 200'000) == Errc::kOk);
  CHECK(remote_read(child.pid, got.data(), address(data.data()), got.size()) == Errc::kOk);
  CHECK(got[0] == original[0]);
  CHECK(std::equal(got.begin() + 1, got.begin() + 200'001, original.begin() + 3));
  CHECK(std::equal(got.begin() + 200'001, got.end(), original.begin() + 200'001));
  CHECK(data[0] == 9);  // ours is untouched
}

TEST_CASE("no bytes are no work") {
  CHECK(remote_read(::getpid(), nullptr, 0, 0) == Errc::kOk);
  CHECK(remote_write(::getpid(), 0, nullptr, 0) == Errc::kOk);
}

TEST_CASE("a process that has gone is a lost peer") {
  char byte = 0;
  IdleChild child;
  child.kill();
  CHECK(remote_read(child.pid, &byte, address(&byte), 1) == Errc::kPeerLost);
  CHECK(remote_write(child.pid, address(&byte), &byte, 1) == Errc::kPeerLost);
}

TEST_CASE("memory that is not there is an error, also when it begins well") {
  const std::size_t page = commlib::page_bytes();
  void* const mapped = ::mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  REQUIRE(mapped != MAP_FAILED);
  ::munmap(static_cast<std::byte*>(mapped) + page, page);
  std::vector<std::byte> local(2 * page);
  const IdleChild child;
  if (is_permitted(child.pid, mapped)) {
    CHECK(remote_read(child.pid, local.data(), 8, 1) == Errc::kInternal);
    CHECK(remote_read(child.pid, local.data(), address(mapped), 2 * page) == Errc::kInternal);
    CHECK(remote_write(child.pid, address(mapped), local.data(), 2 * page) == Errc::kInternal);
    CHECK(remote_read(child.pid, local.data(), address(mapped), page) == Errc::kOk);
  }
  ::munmap(mapped, page);
}

TEST_CASE("more than 2 GiB are read and written completely" * doctest::skip(kIsTooLargeForThisBuild)) {
  const Window here(520);
  const Window there(520);
  there.fill(3);
  if (!is_permitted(::getpid(), there.data)) return;
  REQUIRE(here.bytes > std::size_t{1} << 31);
  CHECK(remote_read(::getpid(), here.data, address(there.data), here.bytes) == Errc::kOk);
  CHECK(here == there);
  here.fill(101);
  CHECK_FALSE(here == there);
  CHECK(remote_write(::getpid(), address(there.data), here.data, here.bytes) == Errc::kOk);
  CHECK(here == there);
}
