// SPDX-License-Identifier: Apache-2.0
// The TCP transport and the operating system: options, errors that pass, forks, other people's epoll, threads.
#include <signal.h>
#include <sys/wait.h>

#include <semaphore>

#include "base/event_fd.hpp"
#include "base/runner.hpp"
#include "raw_peer.hpp"
#include "socket_calls.hpp"

namespace commlib::test {

namespace {

int int_option(int socket, int level, int name) {
  int value = -1;
  socklen_t length = sizeof value;
  REQUIRE(::getsockopt(socket, level, name, &value, &length) == 0);
  return value;
}

bool is_open_descriptor(int descriptor) { return ::fcntl(descriptor, F_GETFD) >= 0; }

// A transport on a loop of its own: sends what its sink has, then leaves.
class TransportLoop final : public Loop {
 public:
  TransportLoop(PeerId self, Fd socket, std::size_t frames) : sink(self), peer_(1 - self), frames_(frames) {
    std::vector<std::vector<Fd>> sockets(2);
    sockets[peer_].push_back(std::move(socket));
    transport_ = std::make_unique<TcpTransport>(std::move(sockets), TcpOptions{});
    transport_->attach(&sink);
    sink.may_call = true;
    for (std::size_t i = 0; i < frames; ++i) sink.queue(peer_, static_cast<std::uint32_t>(i * 37 % 90'000));
  }

  int do_work() override {
    if (std::exchange(first_, false)) transport_->notify(peer_);
    const int moved = transport_->do_work();
    if (sink.received(peer_).size() == frames_) transport_->finish();
    if (sink.closed(peer_).times == 1 && !std::exchange(over_, true)) done.release();
    return moved;
  }

  void wait_for_work() noexcept override {
    pollfd sleepers[2] = {{transport_->descriptor(), POLLIN, 0}, {wake_.descriptor(), POLLIN, 0}};
    ::poll(sleepers, 2, -1);
    wake_.drain();
  }

  void wake() noexcept override { wake_.signal(); }

  TestSink sink;
  std::binary_semaphore done{0};

 private:
  std::unique_ptr<TcpTransport> transport_;
  EventFd wake_;
  const PeerId peer_;
  const std::size_t frames_;
  bool first_ = true;
  bool over_ = false;
};

}  // namespace

TEST_CASE("tcp: sockets are made ready for it") {
  FdPair pair = tcp_pair();
  const int socket = pair.first.get();
  REQUIRE(::fcntl(socket, F_SETFD, 0) == 0);
  std::vector<std::vector<Fd>> sockets(2);
  sockets[1].push_back(std::move(pair.first));
  const TcpTransport transport(std::move(sockets), {.peer_timeout_ms = 12'345, .notsent_lowat_bytes = 77'777});
  CHECK((::fcntl(socket, F_GETFL) & O_NONBLOCK) != 0);
  CHECK(::fcntl(socket, F_GETFD) == FD_CLOEXEC);
  CHECK(::fcntl(transport.descriptor(), F_GETFD) == FD_CLOEXEC);
  CHECK(int_option(socket, IPPROTO_TCP, TCP_NODELAY) == 1);
  CHECK(int_option(socket, IPPROTO_TCP, TCP_NOTSENT_LOWAT) == 77'777);
  CHECK(int_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT) == 12'345);
}

TEST_CASE("tcp: what it has been given is closed even when it cannot be constructed") {
  for (const bool is_none : {true, false}) {
    FdPair pair = unix_pair();
    const int good = pair.first.get();
    std::vector<std::vector<Fd>> sockets(3);
    sockets[1].push_back(std::move(pair.first));
    sockets[2].push_back(is_none ? Fd() : Fd(::open("/dev/null", O_RDWR | O_CLOEXEC)));
    CHECK_THROWS_AS(TcpTransport(std::move(sockets), TcpOptions{}), Error);
    CHECK_FALSE(is_open_descriptor(good));
  }
}

TEST_CASE("tcp: it works without peers") {
  TcpTransport transport(std::vector<std::vector<Fd>>(1), TcpOptions{.phase = 5});
  TestSink sink(0);
  transport.attach(&sink);
  transport.notify(0);
  CHECK(transport.do_work() == 0);
  transport.finish();
  CHECK(transport.finished());
}

TEST_CASE("tcp: its descriptor can be watched by another epoll instance") {
  RawPeers world;
  world.run();
  const Fd outer(::epoll_create1(EPOLL_CLOEXEC));
  epoll_event event{};
  event.events = EPOLLIN;
  REQUIRE(::epoll_ctl(outer.get(), EPOLL_CTL_ADD, world.transport->descriptor(), &event) == 0);
  CHECK(::epoll_wait(outer.get(), &event, 1, 0) == 0);
  world.feed_frame(1, 100);
  CHECK(::epoll_wait(outer.get(), &event, 1, kPatienceMs) == 1);
  world.run();
  CHECK(::epoll_wait(outer.get(), &event, 1, 0) == 0);
  world.send(5);
  CHECK(::epoll_wait(outer.get(), &event, 1, 0) == 1);
  world.run();
  CHECK(::epoll_wait(outer.get(), &event, 1, 0) == 0);
  world.check_contract();
}

TEST_CASE("tcp: errors that pass are waited for") {
  for (const int error : {EINTR, ENOBUFS, ENOMEM}) {
    RawPeers world(1, 2);
    world.run();
    socket_calls.fail(error, 6);
    world.feed_frame(1, 5000);
    world.send(3000);
    CHECK(world.run_until([&] { return world.sink.received(1).size() == 1 && world.sink.sent(1) == 1; }));
    CHECK(socket_calls.times <= 0);
    CHECK(world.sink.closed(1).times == 0);
    world.check_contract();
  }
}

TEST_CASE("tcp: while the kernel has no memory it does not spin") {
  RawPeers world;
  world.run();
  socket_calls.clear();
  socket_calls.fail(ENOBUFS, 1'000'000);
  world.send(3000);
  CHECK_FALSE(world.run_until([&] { return world.sink.sent(1) == 1; }, 100));
  CHECK(socket_calls.sends >= 1);
  CHECK(socket_calls.sends + socket_calls.receives + socket_calls.waits < 300);
  socket_calls.fail(0, 0);
  CHECK(world.run_until([&] { return world.sink.sent(1) == 1; }));
  world.check_contract();
}

TEST_CASE("tcp: many small frames share a system call, both ways") {
  RawPeers world;
  world.run();
  socket_calls.clear();
  for (int i = 0; i < 160; ++i) world.send(0);
  world.run();
  CHECK(socket_calls.sends <= 11);
  Bytes wire;
  for (std::uint64_t number = 1; number <= 160; ++number) append_frame(&wire, made_frame(1, 0, number, 0));
  world.feed(wire);
  socket_calls.clear();
  world.run();
  CHECK(world.sink.received(1).size() == 160);
  CHECK(socket_calls.receives <= 4);
  world.check_contract();
}

TEST_CASE("tcp: close in a forked child closes the child's descriptors and takes nothing from the parent") {
  RawPeers world(2, 2);
  world.send(10);
  world.run();
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    bool all_closed = true;
    world.given.push_back(world.transport->descriptor());
    world.transport->close();
    world.transport->close();
    for (const int descriptor : world.given) all_closed = all_closed && !is_open_descriptor(descriptor);
    ::_exit(all_closed && world.step() == 0 ? 0 : 1);
  }
  int status = -1;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  world.send(20, 2);
  world.feed_frame(1, 30, 2, 1);
  world.run();
  CHECK(world.sink.sent(2) == 1);
  CHECK(world.sink.received(2).size() == 1);
  CHECK(world.sink.closed(1).times == 0);
  world.check_contract();
}

TEST_CASE("tcp: a lost peer sees the end although a child still holds the sockets") {
  RawPeers world(1, 2, tcp_pair);
  world.run();
  int ready[2];
  REQUIRE(::pipe(ready) == 0);
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    char byte = 0;
    ::close(ready[1]);
    (void)!::read(ready[0], &byte, 1);  // until the parent closes it
    ::_exit(0);
  }
  ::close(ready[0]);
  world.feed(Bytes(sizeof(Frame)), 1, 0);  // malformed
  CHECK(world.run_until([&] { return world.sink.closed(1).times > 0; }));
  world.run();
  CHECK(world.is_closed(1, Errc::kInternal, 0));
  for (const std::size_t stream : {0u, 1u}) {
    char byte = 0;
    CHECK(is_readable(world.raw[0][stream].get(), kPatienceMs));
    CHECK(::recv(world.raw[0][stream].get(), &byte, 1, MSG_DONTWAIT) <= 0);
    CHECK(::send(world.raw[0][stream].get(), "x", 1, MSG_NOSIGNAL) == 1);
  }
  CHECK_FALSE(is_readable(world.transport->descriptor(), 50));  // what is sent to the child wakes nobody here
  CHECK(world.step() == 0);
  ::close(ready[1]);
  int status = -1;
  CHECK(::waitpid(child, &status, 0) == child);
  world.check_contract();
}

TEST_CASE("tcp: two transports on two threads") {
  constexpr std::size_t kFrames = 1500;
  FdPair pair = tcp_pair();
  TransportLoop zero(0, std::move(pair.first), kFrames);
  TransportLoop one(1, std::move(pair.second), kFrames);
  const auto on_failure = [](const char* what) { FAIL_CHECK(what); };
  Runner zero_runner("zero", zero, on_failure);
  Runner one_runner("one", one, on_failure);
  zero_runner.start();
  one_runner.start();
  CHECK(zero.done.try_acquire_for(std::chrono::milliseconds(3 * kPatienceMs)));
  CHECK(one.done.try_acquire_for(std::chrono::milliseconds(kPatienceMs)));
  zero_runner.stop();
  one_runner.stop();
  for (TransportLoop* const loop : {&zero, &one}) {
    const PeerId peer = loop == &zero ? 1 : 0;
    CHECK(loop->sink.received(peer).size() == kFrames);
    CHECK(loop->sink.sent(peer) == kFrames);
    CHECK(loop->sink.closed(peer).code == Errc::kOk);
    CHECK(loop->sink.violations.size() == 0);
  }
}

// A connection that is good, on which something bad was to be sent: the other side keeps sending, so no event ever tells.
TEST_CASE("tcp: what a send has met is told though the other side goes on") {
  RawPeers peers;
  peers.run();
  peers.send(100);
  socket_calls.fail(EFAULT, 1);
  peers.step();
  CHECK(socket_calls.times <= 0);
  peers.feed_frame(1, 10);
  CHECK(peers.run_until([&] { return peers.sink.closed(1).times == 1; }));
  CHECK(peers.is_closed(1, Errc::kPeerLost, EFAULT));
  socket_calls.fail(0, 0);
}

}  // namespace commlib::test
