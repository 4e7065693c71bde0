// SPDX-License-Identifier: Apache-2.0
#include "sockets.hpp"
#include "transport/tcp.hpp"
#include "transport_suite.hpp"

namespace commlib::test {

namespace {

// Every endpoint connected to every other one.
class TcpWorld final : public World {
 public:
  TcpWorld(PeerId endpoints, std::uint32_t streams, FdPair (*connect)(int), int buffer_bytes) : World(endpoints) {
    std::vector<std::vector<std::vector<Fd>>> sockets(endpoints);
    for (auto& of_endpoint : sockets) of_endpoint.resize(endpoints);
    for (PeerId low = 0; low < endpoints; ++low) {
      for (PeerId high = low + 1; high < endpoints; ++high) {
        for (std::uint32_t i = 0; i < streams; ++i) {
          FdPair pair = connect(buffer_bytes);
          sockets[low][high].push_back(std::move(pair.first));
          sockets[high][low].push_back(std::move(pair.second));
        }
      }
    }
    for (PeerId id = 0; id < endpoints; ++id) {
      transports_.push_back(std::make_unique<TcpTransport>(std::move(sockets[id]), TcpOptions{}));
      transports_.back()->attach(&sink(id));
    }
  }
  Transport& at(PeerId id) override { return *transports_[id]; }
  void pass_ms(int ms) override { ::poll(nullptr, 0, ms); }

 private:
  std::vector<std::unique_ptr<TcpTransport>> transports_;
};

template <FdPair (*kConnect)(int), int kBufferBytes, std::size_t kBulk>
struct Sockets {
  static constexpr std::size_t kBulkBytes = kBulk;
  static std::unique_ptr<World> make(PeerId endpoints, std::uint32_t streams) {
    return std::make_unique<TcpWorld>(endpoints, streams, kConnect, kBufferBytes);
  }
};

using Tcp = Sockets<tcp_pair, 0, 32 << 20>;
using TcpWithSmallBuffers = Sockets<tcp_pair, 4096, 2 << 20>;
using Unix = Sockets<unix_pair, 0, 32 << 20>;
using UnixWithSmallBuffers = Sockets<unix_pair, 1, 8 << 20>;

}  // namespace

COMMLIB_TRANSPORT_SUITE(Tcp, TcpWithSmallBuffers, Unix, UnixWithSmallBuffers);

}  // namespace commlib::test
