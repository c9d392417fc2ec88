// The allocator's reports, as dictionaries in PyTorch's formats.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <vector>

#include "allocator/config.hpp"
#include "allocator/history.hpp"
#include "allocator/pausing.hpp"
#include "allocator/scopes.hpp"
#include "allocator/segments.hpp"
#include "allocator/stats.hpp"

namespace pac::bindings {

/// The flat dictionary of torch.cuda.memory_stats.
pybind11::dict counters(const alloc::Stats& stats, const alloc::Config& config);

/// Adds the statistics missing from torch.cuda.memory_stats.
void add_fragmentation(pybind11::dict& into, const alloc::Stats& stats, const alloc::Fragmentation& fragmentation);

/// The fields of a pause and of a resume, in bytes.
pybind11::dict to_dict(const alloc::PauseReport& report);
pybind11::dict to_dict(const alloc::ResumeReport& report);

pybind11::dict scope(const alloc::ScopeStats& stats);
pybind11::dict block(const alloc::BlockInfo& block);

/// In the format of torch.cuda.memory._snapshot; `device` is the index in the entries.
pybind11::dict snapshot(int device, const std::vector<alloc::SegmentInfo>& segments, const alloc::Trace& trace,
                        const alloc::Config& config);

/// The bit of HistoryOptions::skip_actions for an action of the snapshot format. ValueError for any other name.
std::uint32_t action_bit(const std::string& action);

}  // namespace pac::bindings
