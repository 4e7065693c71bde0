// SPDX-License-Identifier: Apache-2.0
#include "memory/numa.hpp"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <climits>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string_view>
#include <system_error>

#include "memory/segment.hpp"

namespace commlib {

namespace {

constexpr int kMostCpus = 1 << 20;  // more in one list is nonsense
constexpr int kMostNodes = 1024;    // as many as Linux can have

// A whole number without sign, and nothing else.
bool parse_number(std::string_view text, int* number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *number);
  return error == std::errc{} && end == text.data() + text.size() && *number >= 0;
}

bool parse_range(std::string_view text, std::vector<int>* cpus) {
  const auto dash = text.find('-');
  int first = 0;
  int last = 0;
  if (!parse_number(text.substr(0, dash), &first)) return false;
  if (dash == std::string_view::npos) {
    last = first;
  } else if (!parse_number(text.substr(dash + 1), &last)) {
    return false;
  }
  if (last < first || last >= kMostCpus) return false;
  for (int cpu = first; cpu <= last; ++cpu) cpus->push_back(cpu);
  return true;
}

}  // namespace

bool parse_cpu_list(const std::string& text, std::vector<int>* cpus) {
  std::string_view rest = text;
  while (!rest.empty() && (rest.back() == '\n' || rest.back() == ' ')) rest.remove_suffix(1);
  std::vector<int> found;
  while (!rest.empty()) {
    const auto comma = rest.find(',');
    if (!parse_range(rest.substr(0, comma), &found)) return false;
    if (comma == std::string_view::npos) break;
    rest.remove_prefix(comma + 1);
    if (rest.empty()) return false;
  }
  std::sort(found.begin(), found.end());
  *cpus = std::move(found);
  return true;
}

NumaTopology NumaTopology::read(const std::string& directory) {
  NumaTopology topology;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    NumaNode node;
    if (name.rfind("node", 0) != 0 || !parse_number(std::string_view(name).substr(4), &node.id)) continue;
    std::ifstream file(entry->path() / "cpulist");
    std::string line;
    std::getline(file, line);
    if (file.bad() || !file.is_open() || !parse_cpu_list(line, &node.cpus)) return {};
    topology.nodes_.push_back(std::move(node));
  }
  std::sort(topology.nodes_.begin(), topology.nodes_.end(),
            [](const NumaNode& a, const NumaNode& b) { return a.id < b.id; });
  return topology;
}

int NumaTopology::node_of_cpu(int cpu) const noexcept {
  for (const NumaNode& node : nodes_) {
    if (std::binary_search(node.cpus.begin(), node.cpus.end(), cpu)) return node.id;
  }
  return -1;
}

bool NumaTopology::has_node(int id) const noexcept {
  return std::any_of(nodes_.begin(), nodes_.end(), [id](const NumaNode& node) { return node.id == id; });
}

NumaAnswer bind_to_node(const NumaTopology& topology, void* data, std::size_t bytes, int node) noexcept {
  if (topology.nodes().size() == 1) return NumaAnswer::kOneNode;
  if (!topology.has_node(node) || node >= kMostNodes) return NumaAnswer::kUnsupported;

  constexpr int kBits = sizeof(unsigned long) * CHAR_BIT;
  std::array<unsigned long, kMostNodes / kBits> mask{};
  mask[static_cast<std::size_t>(node / kBits)] = 1UL << (node % kBits);

  const auto begin = reinterpret_cast<std::uintptr_t>(data) / page_bytes() * page_bytes();
  const auto end = reinterpret_cast<std::uintptr_t>(data) + bytes;
  // Preferred, not bound: a full node must not end in the out-of-memory killer. The kernel wants one bit more than it
  // reads.
  if (::syscall(SYS_mbind, begin, end - begin, MPOL_PREFERRED, mask.data(), kMostNodes + 1UL, 0U) == 0) {
    return NumaAnswer::kBound;
  }
  return errno == EPERM ? NumaAnswer::kNotPermitted : NumaAnswer::kUnsupported;
}

}  // namespace commlib
