// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include "sched/admission.hpp"

using commlib::Admission;

TEST_CASE("admission: by priority, first come first served among equals") {
  Admission<const char> admission(100);
  const char who[5] = {};
  admission.add(&who[0], 100, 0);
  REQUIRE(admission.admit() == &who[0]);
  admission.add(&who[1], 40, 1);
  admission.add(&who[2], 40, 5);
  admission.add(&who[3], 40, 5);
  admission.add(&who[4], 40, -5);
  CHECK(admission.admit() == nullptr);
  CHECK(admission.waiting() == 4);
  admission.release(100);
  CHECK(admission.admit() == &who[2]);
  CHECK(admission.admit() == &who[3]);
  CHECK(admission.admit() == nullptr);
  CHECK(admission.taken_bytes() == 80);
  admission.release(40);
  CHECK(admission.admit() == &who[1]);
  CHECK(admission.admit() == nullptr);
  admission.release(40);
  CHECK(admission.admit() == &who[4]);
}

TEST_CASE("admission: what does not fit is not overtaken by what is behind it") {
  Admission<const char> admission(100);
  const char who[4] = {};
  admission.add(&who[0], 60, 0);
  REQUIRE(admission.admit() == &who[0]);
  admission.add(&who[1], 50, 3);
  admission.add(&who[2], 10, 2);
  CHECK(admission.admit() == nullptr);
  admission.add(&who[3], 10, 4);  // more urgent than the large one: this may pass
  CHECK(admission.admit() == &who[3]);
  CHECK(admission.admit() == nullptr);
  admission.release(60);
  CHECK(admission.admit() == &who[1]);
  CHECK(admission.admit() == &who[2]);
}

TEST_CASE("admission: what is larger than the budget goes alone") {
  Admission<const char> admission(100);
  const char who[3] = {};
  admission.add(&who[0], 1, 9);
  admission.add(&who[1], UINT64_MAX / 2, 5);
  admission.add(&who[2], 1, 1);
  REQUIRE(admission.admit() == &who[0]);
  CHECK(admission.admit() == nullptr);
  admission.release(1);
  CHECK(admission.admit() == &who[1]);
  CHECK(admission.admit() == nullptr);  // nothing fits beside it
  admission.release(UINT64_MAX / 2);
  CHECK(admission.admit() == &who[2]);
}

TEST_CASE("admission: one that waits no longer is forgotten, and the order of the rest stays") {
  Admission<const char> admission(10);
  const char who[6] = {};
  for (int i = 0; i < 6; ++i) admission.add(&who[i], 10, i % 3);
  admission.remove(&who[2]);
  admission.remove(&who[3]);
  for (const int expected : {5, 1, 4, 0}) {
    CHECK(admission.admit() == &who[expected]);
    CHECK(admission.admit() == nullptr);
    admission.release(10);
  }
  CHECK(admission.waiting() == 0);
  CHECK(admission.taken_bytes() == 0);
}
