// SPDX-License-Identifier: Apache-2.0
// How fast frames cross a TCP connection of this machine to itself, beside a plain loop of blocking send and recv of
// the same messages. One line a case; medians of several runs that take turns:
//
//   transport <raw|tcp> <one-way|both-ways> streams=<n> bytes=<of each payload> <GB/s> <thousand frames/s>
//   transport calls bytes=<of each payload> send=<a frame> receive=<a frame> epoll_wait=… poll=… write=…
#include <poll.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <semaphore>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "base/event_fd.hpp"
#include "base/runner.hpp"
#include "transport/socket_calls.hpp"
#include "transport/sockets.hpp"
#include "transport/tcp.hpp"

namespace {

using commlib::test::FdPair;
using commlib::test::socket_calls;

constexpr int kRuns = 5;

struct Case {
  std::uint32_t payload_bytes;
  std::size_t frames;
  std::uint32_t streams;
  bool both_ways;
};

// Sends and receives so many frames, all from and into the same block.
class Side final : public commlib::Loop, public commlib::FrameSink {
 public:
  Side(commlib::PeerId self, std::vector<commlib::Fd> streams, std::uint32_t payload_bytes, std::size_t to_send,
       std::size_t to_receive)
      : peer_(1 - self), source_(payload_bytes), target_(streams.size()), to_send_(to_send), to_receive_(to_receive) {
    std::vector<std::vector<commlib::Fd>> sockets(2);
    sockets[peer_] = std::move(streams);
    transport_ = std::make_unique<commlib::TcpTransport>(std::move(sockets), commlib::TcpOptions{});
    transport_->attach(this);
    transport_->notify(peer_);
    for (auto& target : target_) target.resize(payload_bytes);
  }

  int do_work() override { return transport_->do_work(); }

  void wait_for_work() noexcept override {
    pollfd sleepers[2] = {{transport_->descriptor(), POLLIN, 0}, {wake_.descriptor(), POLLIN, 0}};
    ::poll(sleepers, 2, -1);
  }

  void wake() noexcept override { wake_.signal(); }

  commlib::Errc on_header(commlib::PeerId, const commlib::Frame&, std::byte** into) noexcept override {
    *into = target_[next_target_++ % target_.size()].data();  // one for each stream is as many as can be open
    return commlib::Errc::kOk;
  }
  commlib::Errc on_frame(commlib::PeerId, const commlib::Frame&) noexcept override {
    --to_receive_;
    finish_if_done();
    return commlib::Errc::kOk;
  }
  bool next_frame(commlib::PeerId, commlib::OutFrame* out) noexcept override {
    if (to_send_ == 0) return false;
    --to_send_;
    ++in_flight_;
    out->frame.kind = commlib::FrameKind::kPush;
    out->frame.payload_bytes = static_cast<std::uint32_t>(source_.size());
    out->payload = source_.data();
    return true;
  }
  void on_sent(commlib::PeerId, const commlib::OutFrame&) noexcept override {
    --in_flight_;
    finish_if_done();
  }
  void on_closed(commlib::PeerId, commlib::Errc, int) noexcept override {}

  std::binary_semaphore done{0};

 private:
  void finish_if_done() noexcept {
    if (to_send_ + in_flight_ + to_receive_ == 0) done.release();
  }

  std::unique_ptr<commlib::TcpTransport> transport_;
  commlib::EventFd wake_;
  const commlib::PeerId peer_;
  std::vector<std::byte> source_;
  std::vector<std::vector<std::byte>> target_;
  std::size_t next_target_ = 0;
  std::size_t to_send_, to_receive_;
  std::size_t in_flight_ = 0;
};

double run_transport(const Case& one) {
  std::vector<commlib::Fd> zero_ends, one_ends;
  for (std::uint32_t i = 0; i < one.streams; ++i) {
    FdPair pair = commlib::test::tcp_pair();
    zero_ends.push_back(std::move(pair.first));
    one_ends.push_back(std::move(pair.second));
  }
  const std::size_t back = one.both_ways ? one.frames : 0;
  Side zero(0, std::move(zero_ends), one.payload_bytes, one.frames, back);
  Side other(1, std::move(one_ends), one.payload_bytes, back, one.frames);
  const auto on_failure = [](const char* what) { std::fprintf(stderr, "%s\n", what); };
  commlib::Runner runners[2] = {{"zero", zero, on_failure}, {"one", other, on_failure}};
  socket_calls.clear();
  const std::int64_t begin = commlib::now_ns();
  for (auto& runner : runners) runner.start();
  zero.done.acquire();
  other.done.acquire();
  const std::int64_t end = commlib::now_ns();
  for (auto& runner : runners) runner.stop();
  return static_cast<double>(end - begin) * 1e-9;
}

void send_all(int socket, std::size_t bytes, std::size_t times) {
  const std::vector<std::byte> block(bytes);
  for (std::size_t i = 0; i < times; ++i)
    for (std::size_t at = 0; at < bytes;)
      at += static_cast<std::size_t>(commlib::test::must(static_cast<int>(::send(socket, &block[at], bytes - at, 0))));
}

void receive_all(int socket, std::size_t bytes, std::size_t times) {
  std::vector<std::byte> block(bytes);
  for (std::size_t i = 0; i < times; ++i)
    for (std::size_t at = 0; at < bytes;)
      at += static_cast<std::size_t>(commlib::test::must(static_cast<int>(::recv(socket, &block[at], bytes - at, 0))));
}

double run_raw(const Case& one) {
  const FdPair pair = commlib::test::tcp_pair();
  const std::size_t bytes = sizeof(commlib::Frame) + one.payload_bytes;
  const std::int64_t begin = commlib::now_ns();
  std::vector<std::thread> threads;
  threads.emplace_back(send_all, pair.first.get(), bytes, one.frames);
  threads.emplace_back(receive_all, pair.second.get(), bytes, one.frames);
  if (one.both_ways) {
    threads.emplace_back(send_all, pair.second.get(), bytes, one.frames);
    threads.emplace_back(receive_all, pair.first.get(), bytes, one.frames);
  }
  for (auto& thread : threads) thread.join();
  return static_cast<double>(commlib::now_ns() - begin) * 1e-9;
}

void measure(const Case& one) {
  std::vector<double> raw, tcp;
  const double frames = static_cast<double>(one.frames) * (one.both_ways ? 2 : 1);
  for (int run = 0; run < kRuns; ++run) {
    raw.push_back(run_raw(one));
    tcp.push_back(run_transport(one));
  }
  const auto report = [&](const char* what, std::vector<double>& seconds, std::uint32_t streams) {
    std::nth_element(seconds.begin(), seconds.begin() + kRuns / 2, seconds.end());
    const double median = seconds[kRuns / 2];
    std::printf("transport %s %s streams=%u bytes=%u %.2f %.0f\n", what, one.both_ways ? "both-ways" : "one-way",
                streams, one.payload_bytes, frames * one.payload_bytes / median * 1e-9, frames / median * 1e-3);
  };
  report("raw", raw, 1);
  report("tcp", tcp, one.streams);
  const auto per_frame = [&](const std::atomic<std::uint64_t>& calls) { return static_cast<double>(calls) / frames; };
  std::printf("transport calls bytes=%u send=%.3f receive=%.3f epoll_wait=%.3f poll=%.3f write=%.3f\n",
              one.payload_bytes, per_frame(socket_calls.sends), per_frame(socket_calls.receives),
              per_frame(socket_calls.waits), per_frame(socket_calls.polls), per_frame(socket_calls.writes));
}

}  // namespace

int main() {
  constexpr std::uint32_t kBlock = 64 * 1024;
  for (const Case& one : {Case{kBlock, 8000, 1, false}, Case{kBlock, 8000, 4, false}, Case{kBlock, 4000, 1, true},
                          Case{4096, 60'000, 1, false}, Case{0, 500'000, 1, false}})
    measure(one);
}
