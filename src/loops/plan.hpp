// SPDX-License-Identifier: Apache-2.0
// The route of a partition on its host, as data: an immutable list of stages, chosen once from the topology. A special
// case is a shorter list, never an `if` inside a stage.
//
//   one host              MEET → ADMIT → STAGE_IN → LOCAL_SUM → COLLECT → LET_GO → STAGE_OUT
//   one host, small       COMPARE → SUM_COPIES
//   several hosts         ANNOUNCE → AWAIT_GRANT → STAGE_IN → LOCAL_REDUCE → CONTRIBUTE → LOCAL_BROADCAST → RELEASE
//   nothing to put in     ANNOUNCE → LOCAL_BROADCAST → RELEASE          (a broadcast whose root is elsewhere)
//   one rank on its host  the exchange does all, directly on the user's memory
#pragma once

#include <span>

#include "loops/local.hpp"

namespace commlib {

// kOk: the next stage. kAgain: nothing to do before the row is announced again. A stage that fails says so in the row.
using Stage = Errc (*)(LocalContext& context, PartTask& task) noexcept;
using Plan = std::span<const Stage>;

[[nodiscard]] Plan plan_for(const LocalContext& context, const Operation& operation) noexcept;

// Take a task as far as it goes. Returns true when it has finished: it has then been taken out of the task table and has
// let go of the operation, and must not be touched any more. Only for the task's holder.
[[nodiscard]] bool progress(LocalContext& context, PartTask& task) noexcept;

}  // namespace commlib
