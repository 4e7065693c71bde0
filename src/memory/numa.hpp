// SPDX-License-Identifier: Apache-2.0
// Which memory is near which CPU.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace commlib {

struct NumaNode {
  int id = 0;
  std::vector<int> cpus;  // ascending; empty for a node of memory only
};

class NumaTopology {
 public:
  // Reads nodes from `directory`. One that is missing or cannot be understood gives an empty topology: a kernel without
  // NUMA.
  [[nodiscard]] static NumaTopology read(const std::string& directory = "/sys/devices/system/node");

  [[nodiscard]] const std::vector<NumaNode>& nodes() const noexcept { return nodes_; }  // by id
  [[nodiscard]] int node_of_cpu(int cpu) const noexcept;                                // −1: none
  [[nodiscard]] bool has_node(int id) const noexcept;

 private:
  std::vector<NumaNode> nodes_;
};

// All of them are ordinary answers.
enum class NumaAnswer {
  kBound,
  kOneNode,       // all memory is equally near
  kNotPermitted,  // containers often forbid it
  kUnsupported,   // no such node, or a kernel without NUMA
};

// Asks that the pages of the range be taken from `node` while it has any, from others then. Concerns pages not yet
// resident, and all processes that map them.
[[nodiscard]] NumaAnswer bind_to_node(const NumaTopology& topology, void* data, std::size_t bytes, int node) noexcept;

// "0-3,8" → 0 1 2 3 8. False, and nothing is stored, for anything else; an empty list is fine.
[[nodiscard]] bool parse_cpu_list(const std::string& text, std::vector<int>* cpus);

}  // namespace commlib
