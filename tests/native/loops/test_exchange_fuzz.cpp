// SPDX-License-Identifier: Apache-2.0
// A host that sends whatever it likes: right frames, in any order, and frames with some field damaged. Whatever it is, the
// other hosts' memory stays whole (the sanitizers say), and every operation ends, in words: done, mismatch or peer lost.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <random>

#include "commlib/job.hpp"
#include "sched/placement.hpp"
#include "sched/wire.hpp"

namespace commlib::test {

namespace {

using Random = std::mt19937_64;

// An operation as the wire knows it.
struct Submitted {
  Job::Name name;
  std::uint64_t count;
  std::uint64_t round;
  Collective collective;
};

// One connection of the impostor's: what it still has to say, as the socket takes it.
struct Wire {
  Fd socket;
  std::deque<std::byte> unsent;

  void move() {
    std::byte heard[4096];
    while (::recv(socket.get(), heard, sizeof heard, MSG_DONTWAIT) > 0) {
    }
    while (!unsent.empty()) {
      std::byte chunk[4096];
      const std::size_t bytes = std::min(sizeof chunk, unsent.size());
      std::copy_n(unsent.begin(), bytes, chunk);
      const ssize_t sent = ::send(socket.get(), chunk, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (sent <= 0) return;
      unsent.erase(unsent.begin(), unsent.begin() + sent);
    }
  }
};

template <class Container>
auto& pick(Container& from, Random& random) {
  return from[random() % std::size(from)];
}

class Impostor {
 public:
  Impostor(const JobOptions& options, std::uint64_t seed)
      : random_(seed),
        options_(options),
        job_(options),
        placement_(static_cast<std::uint32_t>(options.ranks_per_host.size()), options.servers) {
    for (auto& streams : job_.raw()) {
      for (Fd& socket : streams) wires_.push_back({std::move(socket), {}});
    }
  }

  // True if all operations have ended as they may.
  bool run() {
    auto loops = job_.loops();
    submit_all();
    for (int turn = 0; turn < 120; ++turn) {
      if (below(3) == 0) say(pick(wires_, random_), made());
      for (Wire& wire : wires_) wire.move();
      for (std::uint64_t i = below(6); i > 0; --i) (void)loops[below(loops.size())]();
    }
    wires_.clear();  // it dies without a word
    for (int turn = 0; turn < 20'000 && !all_done(); ++turn) {
      for (auto& loop : loops) (void)loop();
    }
    return all_done() && std::ranges::all_of(flights_, [](const auto& flight) {
             const Errc code = flight->completion.failure().code;
             return code == Errc::kOk || code == Errc::kMismatch || code == Errc::kPeerLost;
           });
  }

 private:
  std::uint64_t below(std::uint64_t bound) { return random_() % bound; }

  void submit_all() {
    const std::uint64_t counts[] = {0, 1, 17, 5'000, 16'384, 40'000, 70'000};
    for (int number = 0; number < 4; ++number) {
      const std::uint64_t count = counts[below(std::size(counts))];
      Submitted submitted{job_.declare("t" + std::to_string(number), count * 4), count, 1,
                          below(3) == 0 ? Collective::kBroadcast : Collective::kReduce};
      if (count == 0 && below(2) == 0) submitted.collective = Collective::kBarrier;
      submitted_.push_back(submitted);
      for (std::uint32_t rank = 0; rank < job_.size(); ++rank) {
        auto& buffer = buffers_.emplace_back(count, static_cast<std::int32_t>(rank));
        Request request;
        request.key = Job::record(submitted.name);
        request.hash = count;
        request.collective = submitted.collective;
        request.dtype = DType::kInt32;
        request.root = job_.size() * static_cast<std::uint32_t>(number % 2);  // a broadcast's: rank 0, or the impostor
        request.input = request.output = buffer.data();
        request.count = count;
        REQUIRE(request.key->try_take());
        REQUIRE(job_.worker(rank).submit(request, &flights_.emplace_back()) == Errc::kOk);
      }
    }
  }

  bool all_done() {
    return std::ranges::all_of(flights_, [](const auto& flight) { return flight->completion.done(); });
  }

  // What a host or an owner might say of a partition that is in flight.
  Frame right() {
    const Submitted& submitted = pick(submitted_, random_);
    const auto part = static_cast<std::uint32_t>(below(submitted.name.rows));
    const PartRange range = part_range(part, submitted.count, 4, options_.partition_bytes);
    const bool whole = submitted.count * 4 <= kGranuleBytes;
    Frame frame;
    frame.key = make_key(submitted.name.key, part);
    frame.round = submitted.round;
    std::vector<Piece> pieces;
    cut(placement_, submitted.name.cursor + range.first * 4, range.count, DType::kInt32, whole, &pieces);
    const Piece& piece = pick(pieces, random_);
    const FrameKind kinds[] = {FrameKind::kReady,  FrameKind::kReady,  FrameKind::kEager, FrameKind::kGrant,
                               FrameKind::kGrant,  FrameKind::kPush,   FrameKind::kPush,  FrameKind::kResult,
                               FrameKind::kResult, FrameKind::kResult, FrameKind::kFail,  FrameKind::kBeat,
                               FrameKind::kLeft};
    frame.kind = pick(kinds, random_);
    if (frame.kind == FrameKind::kReady || frame.kind == FrameKind::kEager) {
      frame.hash = submitted.count;
      frame.start = submitted.name.cursor + range.first * 4;
      frame.count = range.count;
      frame.dtype = static_cast<std::uint8_t>(DType::kInt32);
      frame.op = static_cast<std::uint8_t>(ReduceOp::kSum);
      frame.collective = submitted.collective;
      frame.whole = whole ? 1 : 0;
      frame.flags = below(10) == 0 ? kFlagDisagree : 0;
      if (frame.kind == FrameKind::kEager && submitted.collective == Collective::kReduce)
        frame.payload_bytes = static_cast<std::uint32_t>(range.count * 4);
    } else if (frame.kind == FrameKind::kPush || frame.kind == FrameKind::kResult) {
      frame.start = piece.first_element;
      frame.count = piece.count;
      frame.payload_bytes = piece.count * 4;
    } else if (frame.kind == FrameKind::kFail) {
      frame.code = static_cast<std::uint8_t>(below(2) == 0 ? Errc::kMismatch : Errc::kPeerLost);
    }
    return frame;
  }

  Frame made() {
    Frame frame = right();
    if (below(3) != 0) return frame;
    const std::uint64_t odd[] = {0, 1, 2, 3, 63, 64, 65'536, UINT32_MAX, std::uint64_t{1} << 40, UINT64_MAX, random_()};
    const std::uint64_t value = pick(odd, random_);
    switch (below(14)) {
      case 0:
        frame.key = value;
        break;
      case 1:
        frame.round += value;
        break;
      case 2:
        frame.hash = value;
        break;
      case 3:
        frame.start = below(2) == 0 ? value : frame.start + value;
        break;
      case 4:
        frame.count = below(2) == 0 ? value : frame.count - 1;
        break;
      case 5:
        frame.dtype = static_cast<std::uint8_t>(value);
        break;
      case 6:
        frame.op = static_cast<std::uint8_t>(value);
        break;
      case 7:
        frame.collective = static_cast<Collective>(value);
        break;
      case 8:
        frame.code = static_cast<std::uint8_t>(value);
        break;
      case 9:
        frame.member = static_cast<std::uint32_t>(value);
        break;
      case 10:
        frame.whole = static_cast<std::uint32_t>(value);
        break;
      case 11:
        frame.flags = static_cast<std::uint8_t>(value);
        break;
      case 12:
        frame.kind = static_cast<FrameKind>(below(12));
        break;
      default:
        frame.payload_bytes = static_cast<std::uint32_t>(below(2) == 0 ? value : frame.payload_bytes + 4);
        break;
    }
    return frame;
  }

  void say(Wire& wire, const Frame& frame) {
    const auto* const header = reinterpret_cast<const std::byte*>(&frame);
    wire.unsent.insert(wire.unsent.end(), header, header + sizeof frame);
    // With a payload as long as it says, so that the next header is read as one.
    const std::size_t payload = std::min<std::size_t>(frame.payload_bytes, 1 << 20);
    wire.unsent.insert(wire.unsent.end(), payload, std::byte{1});
  }

  Random random_;
  const JobOptions options_;
  Job job_;
  Placement placement_;
  std::vector<Wire> wires_;
  std::vector<Submitted> submitted_;
  std::deque<std::vector<std::int32_t>> buffers_;
  std::deque<std::shared_ptr<Operation>> flights_;
};

void attack(std::vector<std::uint32_t> ranks_per_host, std::uint32_t servers, std::uint64_t seeds) {
  JobOptions options;
  options.ranks_per_host = std::move(ranks_per_host);
  options.servers = servers;
  options.partition_bytes = 128 * 1024;
  options.arena_bytes = 16 << 20;
  options.threads = false;
  options.last_host_is_raw = true;
  for (std::uint64_t seed = 1; seed <= tried(seeds); ++seed) {
    CAPTURE(seed);
    Impostor impostor(options, seed);
    CHECK(impostor.run());
  }
}

}  // namespace

TEST_CASE("exchange: a host that sends anything, to a host of one rank") { attack({1, 1}, 0, 200); }
TEST_CASE("exchange: a host that sends anything, to a host of two ranks") { attack({2, 1}, 0, 200); }
TEST_CASE("exchange: a host that sends anything, to a host and a server") { attack({1, 1}, 1, 200); }
TEST_CASE("exchange: a host that sends anything, to two hosts and a server") { attack({2, 1, 1}, 1, 100); }

}  // namespace commlib::test
