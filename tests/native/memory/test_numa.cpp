// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "base/cpu.hpp"
#include "memory/numa.hpp"
#include "memory/segment.hpp"

using commlib::NumaAnswer;
using commlib::NumaTopology;
using commlib::parse_cpu_list;

namespace {

// A directory as the kernel would show it, for as long as this lives.
class FakeNodes {
 public:
  FakeNodes() {
    std::string pattern = (std::filesystem::temp_directory_path() / "commlib-numa-XXXXXX").string();
    REQUIRE(::mkdtemp(pattern.data()) != nullptr);
    path = pattern;
  }
  ~FakeNodes() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  FakeNodes(const FakeNodes&) = delete;
  FakeNodes& operator=(const FakeNodes&) = delete;

  void add(const std::string& name, const std::string& cpus) const {
    std::filesystem::create_directory(path + "/" + name);
    std::ofstream(path + "/" + name + "/cpulist") << cpus << '\n';
  }

  std::string path;
};

}  // namespace

TEST_CASE("CPU lists are understood as the kernel writes them") {
  std::vector<int> cpus;
  CHECK(parse_cpu_list("0-3,8,10-11\n", &cpus));
  CHECK(cpus == std::vector<int>{0, 1, 2, 3, 8, 10, 11});
  CHECK(parse_cpu_list("7", &cpus));
  CHECK(cpus == std::vector<int>{7});
  CHECK(parse_cpu_list("\n", &cpus));
  CHECK(cpus.empty());
}

TEST_CASE("nonsense is no CPU list, and nothing is stored") {
  std::vector<int> cpus{5};
  for (const char* text : {"a", "1,", ",1", "1-", "-1", "3-1", "1 2", "1-2-3", "99999999999", "0-4000000"}) {
    CAPTURE(text);
    CHECK_FALSE(parse_cpu_list(text, &cpus));
    CHECK(cpus == std::vector<int>{5});
  }
}

TEST_CASE("a topology has the nodes of its directory, by number, and knows whose a CPU is") {
  const FakeNodes fake;
  fake.add("node10", "");
  fake.add("node2", "4-7");
  fake.add("node0", "0-3,8");
  fake.add("power", "9");
  fake.add("nodes", "9");
  std::ofstream(fake.path + "/online") << "0,2,10\n";
  const auto topology = NumaTopology::read(fake.path);
  REQUIRE(topology.nodes().size() == 3);
  CHECK(topology.nodes()[0].id == 0);
  CHECK(topology.nodes()[1].id == 2);
  CHECK(topology.nodes()[2].id == 10);
  CHECK(topology.nodes()[2].cpus.empty());
  CHECK(topology.node_of_cpu(8) == 0);
  CHECK(topology.node_of_cpu(4) == 2);
  CHECK(topology.node_of_cpu(9) == -1);
  CHECK(topology.has_node(10));
  CHECK_FALSE(topology.has_node(1));
}

TEST_CASE("a directory that is missing or cannot be understood is a machine without NUMA") {
  CHECK(NumaTopology::read("/nowhere").nodes().empty());
  const FakeNodes fake;
  fake.add("node0", "0-3");
  fake.add("node1", "what?");
  CHECK(NumaTopology::read(fake.path).nodes().empty());
  std::filesystem::remove_all(fake.path + "/node1");
  CHECK(NumaTopology::read(fake.path).nodes().size() == 1);
}

TEST_CASE("this machine's CPUs belong to its nodes, where it has any") {
  const auto topology = NumaTopology::read();
  if (topology.nodes().empty()) return;
  for (const int cpu : commlib::affinity_cpus()) CHECK(topology.node_of_cpu(cpu) >= 0);
}

TEST_CASE("binding is not needed with one node and not supported without any") {
  const commlib::Segment segment = commlib::Segment::create(1 << 20);
  CHECK(bind_to_node(NumaTopology{}, segment.data(), segment.bytes(), 0) == NumaAnswer::kUnsupported);
  const FakeNodes fake;
  fake.add("node0", "0-3");
  CHECK(bind_to_node(NumaTopology::read(fake.path), segment.data(), segment.bytes(), 0) == NumaAnswer::kOneNode);
}

TEST_CASE("binding to a node that is there is done or refused, and to one that is not there unsupported") {
  const commlib::Segment segment = commlib::Segment::create(1 << 20);
  const FakeNodes fake;
  fake.add("node0", "0-3");
  fake.add("node1023", "4-7");
  fake.add("node5000", "8");
  const auto topology = NumaTopology::read(fake.path);
  const auto answer = bind_to_node(topology, segment.data() + 100, segment.bytes() - 100, 0);
  // The policy that changes nothing is refused only where all are: by a sandbox, or a kernel without NUMA.
  const bool is_possible = ::syscall(SYS_mbind, segment.data(), segment.bytes(), MPOL_DEFAULT, nullptr, 0UL, 0U) == 0;
  CHECK((answer == NumaAnswer::kBound) == is_possible);
  for (const int node : {1, 1023, 5000, -1}) {
    const auto refused = bind_to_node(topology, segment.data(), segment.bytes(), node);
    const bool is_refusal = refused == NumaAnswer::kUnsupported || refused == NumaAnswer::kNotPermitted;
    CHECK(is_refusal);
  }
  segment.data()[5] = std::byte{1};  // and the memory works all the same
}
