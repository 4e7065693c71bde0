// SPDX-License-Identifier: Apache-2.0
// The arithmetic on one host: a slice of a row, read from the ranks that put something in, combined in local rank order,
// and written where it belongs. Block by block, so that what is written to several places comes from the cache.
#pragma once

#include "loops/local.hpp"

namespace commlib {

// One slice for everybody: into the own output and into every other output that lies in an arena (ranks whose output lies
// in their own memory fetch it with `collect_slice`). The caller has claimed the slice.
[[nodiscard]] Errc sum_slice(const LocalContext& context, const PartTask& task, std::uint32_t slice) noexcept;

// One slice of this host's partial, into the place the row's head names.
[[nodiscard]] Errc reduce_slice(const LocalContext& context, const PartTask& task, std::uint32_t slice) noexcept;

// Fetch a slice that another rank has done into the own output.
[[nodiscard]] Errc collect_slice(const LocalContext& context, const PartTask& task, std::uint32_t slice) noexcept;

// A small sum, from everybody's copy of his input into the own output.
void sum_copies(const LocalContext& context, const PartTask& task) noexcept;
// What a rank that has arrived has said last in a small round that was even, or odd, as this one.
[[nodiscard]] CopyHead* copy_of(const LocalContext& context, const PartTask& task, std::uint32_t rank) noexcept;

// Copy the input to where the others reach it, and the result from there to the output; without the slice of the own rank
// where that was not staged.
void stage_all_but_own(const LocalContext& context, const PartTask& task) noexcept;
void unstage_all_but_own(const LocalContext& context, const PartTask& task) noexcept;

// How many slices a partition of `bytes` bytes has on a host of `local_size` ranks.
[[nodiscard]] std::uint32_t slice_count_of(std::size_t bytes, std::uint32_t local_size) noexcept;

}  // namespace commlib
