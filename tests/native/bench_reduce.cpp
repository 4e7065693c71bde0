// SPDX-License-Identifier: Apache-2.0
// How fast a reduction is, beside a copy of the same memory. One line a case:
//
//   reduce <dtype> <op> n=<inputs> bytes=<each> <in-place|apart> <GB/s>
//
// GB/s counts each input read once and the output written once; a copy likewise. Best of several runs, one thread, CPU
// time.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <vector>

#include "memory/segment.hpp"
#include "reduce/reduce.hpp"

namespace {

using commlib::DType;
using commlib::ReduceOp;

// The time this thread had a CPU: a busy machine disturbs it less than the time of day.
double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

template <class Work>
double best_seconds(Work work) {
  constexpr int kRuns = 15;
  double best = 1e9;
  for (int run = 0; run < kRuns; ++run) {
    const double begin = thread_seconds();
    work();
    best = std::min(best, thread_seconds() - begin);
  }
  return best;
}

struct Case {
  const char* name;
  DType dtype;
  const char* op_name;
  ReduceOp op;
};

constexpr Case kCases[] = {
    {"float32", DType::kFloat32, "sum", ReduceOp::kSum},
    {"float32", DType::kFloat32, "average", ReduceOp::kAverage},
    {"float64", DType::kFloat64, "sum", ReduceOp::kSum},
    {"float16", DType::kFloat16, "sum", ReduceOp::kSum},
    {"float16", DType::kFloat16, "average", ReduceOp::kAverage},
    {"bfloat16", DType::kBfloat16, "sum", ReduceOp::kSum},
    {"bfloat16", DType::kBfloat16, "average", ReduceOp::kAverage},
    {"float32", DType::kFloat32, "max", ReduceOp::kMax},
    {"int32", DType::kInt32, "sum", ReduceOp::kSum},
    {"int32", DType::kInt32, "average", ReduceOp::kAverage},
    {"uint8", DType::kUint8, "sum", ReduceOp::kSum},
};

void measure(std::size_t bytes, std::size_t n) {
  std::vector<commlib::Segment> segments;
  std::vector<const void*> sources;
  for (std::size_t i = 0; i <= n; ++i) {
    segments.push_back(commlib::Segment::create(bytes));
    std::memset(segments.back().data(), 1, bytes);
    if (i < n) sources.push_back(segments.back().data());
  }
  const auto repeats = std::max<std::size_t>(1, (std::size_t{8} << 20) / bytes);
  const auto report = [&](const char* what, double seconds, std::size_t streams) {
    const double moved = static_cast<double>(bytes) * static_cast<double>(streams * repeats);
    std::printf("%s %.2f\n", what, moved / seconds * 1e-9);
  };
  char line[128];
  std::snprintf(line, sizeof line, "copy - - n=1 bytes=%zu apart", bytes);
  report(line, best_seconds([&] {
           for (std::size_t i = 0; i < repeats; ++i) std::memcpy(segments[1].data(), segments[0].data(), bytes);
         }),
         2);
  for (const Case& one : kCases) {
    for (const bool in_place : {true, false}) {
      void* const destination = segments[in_place ? 0 : n].data();
      const double seconds = best_seconds([&] {
        for (std::size_t i = 0; i < repeats; ++i) {
          commlib::reduce_local(one.dtype, one.op, destination, sources.data(), n,
                                bytes / commlib::item_bytes(one.dtype));
        }
      });
      std::snprintf(line, sizeof line, "reduce %s %s n=%zu bytes=%zu %s", one.name, one.op_name, n, bytes,
                    in_place ? "in-place" : "apart");
      report(line, seconds, n + 1);
    }
  }
}

}  // namespace

int main() {
  measure(std::size_t{32} << 20, 2);
  measure(std::size_t{32} << 20, 4);
  measure(std::size_t{256} << 10, 2);
  return 0;
}
