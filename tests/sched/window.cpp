// SPDX-License-Identifier: Apache-2.0
// The rules of the scheduler as plain C functions, so that hypothesis can search for what breaks them.
#include <cstdint>
#include <vector>

#include "base/errc.hpp"
#include "sched/admission.hpp"
#include "sched/partition.hpp"
#include "sched/placement.hpp"

namespace {

using namespace commlib;

// What the function returns, or −1 − the code of what it throws.
template <class Function>
std::int64_t guarded(Function function) {
  try {
    return static_cast<std::int64_t>(function());
  } catch (const Error& error) {
    return -1 - static_cast<std::int64_t>(error.code());
  }
}

using Queue = Admission<const void>;

}  // namespace

extern "C" {

std::int64_t window_part_count(std::uint64_t total_bytes, std::uint64_t partition_bytes) {
  return guarded([&] { return part_count(total_bytes, partition_bytes); });
}

std::int64_t window_part_range(std::uint32_t part, std::uint64_t total_count, std::uint64_t item,
                               std::uint64_t partition_bytes, std::uint64_t* first_and_count) {
  return guarded([&] {
    const PartRange range = part_range(part, total_count, item, partition_bytes);
    first_and_count[0] = range.first;
    first_and_count[1] = range.count;
    return 0;
  });
}

// One turn of the owners, at most `capacity` of them; how many it has.
std::int64_t window_sequence(std::uint32_t hosts, std::uint32_t servers, std::uint32_t* owners,
                             std::uint64_t capacity) {
  return guarded([&] {
    const Placement placement(hosts, servers);
    for (std::size_t i = 0; i < placement.sequence().size() && i < capacity; ++i) owners[i] = placement.sequence()[i];
    return placement.sequence().size();
  });
}

// Pieces as triples (first element, count, owner), at most `capacity` of them; how many there are.
std::int64_t window_cut(std::uint32_t hosts, std::uint32_t servers, std::uint64_t start_byte, std::uint64_t count,
                        int dtype, int whole, std::uint64_t* triples, std::uint64_t capacity) {
  return guarded([&] {
    std::vector<Piece> pieces;
    cut(Placement(hosts, servers), start_byte, count, static_cast<DType>(dtype), whole != 0, &pieces);
    for (std::size_t i = 0; i < pieces.size() && i < capacity; ++i) {
      triples[3 * i] = pieces[i].first_element;
      triples[3 * i + 1] = pieces[i].count;
      triples[3 * i + 2] = pieces[i].owner;
    }
    return pieces.size();
  });
}

void* window_admission(std::uint64_t budget_bytes) { return new Queue(budget_bytes); }
void window_admission_delete(void* queue) { delete static_cast<Queue*>(queue); }
void window_add(void* queue, std::uint64_t waiter, std::uint64_t bytes, std::int32_t priority) {
  static_cast<Queue*>(queue)->add(reinterpret_cast<const void*>(waiter), bytes, priority);
}
std::uint64_t window_admit(void* queue) { return reinterpret_cast<std::uint64_t>(static_cast<Queue*>(queue)->admit()); }
void window_release(void* queue, std::uint64_t bytes) { static_cast<Queue*>(queue)->release(bytes); }
void window_remove(void* queue, std::uint64_t waiter) {
  static_cast<Queue*>(queue)->remove(reinterpret_cast<const void*>(waiter));
}
std::uint64_t window_taken(void* queue) { return static_cast<Queue*>(queue)->taken_bytes(); }
std::uint64_t window_waiting(void* queue) { return static_cast<Queue*>(queue)->waiting(); }
}
