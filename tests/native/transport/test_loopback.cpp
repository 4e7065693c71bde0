// SPDX-License-Identifier: Apache-2.0
#include "transport/loopback.hpp"
#include "transport_suite.hpp"

namespace commlib::test {

namespace {

template <std::uint64_t kSeed>
class LoopbackWorld final : public World {
 public:
  LoopbackWorld(PeerId endpoints, std::uint32_t streams)
      : World(endpoints), hub_(endpoints, {.streams = streams, .seed = kSeed}) {
    for (PeerId id = 0; id < endpoints; ++id) hub_.endpoint(id).attach(&sink(id));
  }
  Transport& at(PeerId id) override { return hub_.endpoint(id); }
  void pass_ms(int ms) override { hub_.advance_ms(ms); }

 private:
  LoopbackHub hub_;
};

struct Loopback {
  static constexpr std::size_t kBulkBytes = 16 << 20;
  static std::unique_ptr<World> make(PeerId endpoints, std::uint32_t streams) {
    return std::make_unique<LoopbackWorld<0>>(endpoints, streams);
  }
};

template <std::uint64_t kSeed>
struct AdverseLoopback : Loopback {
  static std::unique_ptr<World> make(PeerId endpoints, std::uint32_t streams) {
    return std::make_unique<LoopbackWorld<kSeed>>(endpoints, streams);
  }
};

}  // namespace

COMMLIB_TRANSPORT_SUITE(Loopback, AdverseLoopback<1>, AdverseLoopback<2>);

}  // namespace commlib::test
