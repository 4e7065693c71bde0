// SPDX-License-Identifier: Apache-2.0
// What another thread has left for the exchange may be read when the task it is about is gone.
#include <doctest/doctest.h>

#include <memory>

#include "loops/exchange.hpp"
#include "memory/segment.hpp"

namespace commlib::test {

namespace {

struct Sleeper : Loop {
  int do_work() override { return 0; }
  void wait_for_work() noexcept override {}
  void wake() noexcept override {}
};

}  // namespace

TEST_CASE("exchange: a contribution to a round that is over is dropped, and its task is not looked at") {
  Segment rows = Segment::create(ReadyTable::bytes_needed(1));
  Segment memory = Segment::create(1 << 20);
  ReadyTable table(rows, 0, 1);
  TaskTable tasks;
  FinishedList finished;
  Arena arena(memory, 0, memory.bytes());
  std::atomic<std::uint64_t> staged{0};
  LocalContext context(table, tasks, finished, arena, staged);
  context.global_ranks = {0};
  Egress egress(2);
  Sleeper loop;
  Exchange exchange({.hosts = 2, .node_of_rank = {0, 1}, .eager_budget_bytes = 1 << 20}, context, egress, loop);

  auto operation = std::make_unique<Operation>();
  operation->key = std::make_shared<KeyRecord>();
  operation->key->declared_key = 5;
  operation->round = 3;
  operation->parts = std::make_unique<PartTask[]>(1);
  operation->parts[0].operation = operation.get();
  exchange.contribute(operation->parts[0]);
  operation.reset();  // the job has failed meanwhile, and the operation with it
  CHECK(exchange.take_messages() == 1);
  CHECK(exchange.is_idle());
}

}  // namespace commlib::test
