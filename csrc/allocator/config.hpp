// The allocator's settings: one table, and one parser for every place that takes settings.
//
// To add a setting: a field of Config, a row of kSettings and the code that reads the field; then a keyword of
// pyactcomp.allocator.enable and a property in _core.pyi. Parser, checks, texts and Python's properties follow from the
// row.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "allocator/types.hpp"

namespace pac::alloc {

enum class Growth : std::uint8_t {
  kVmm,         ///< physical handles mapped into reserved addresses: free pieces can be moved together
  kMalloc,      ///< one cudaMalloc per segment, with the native allocator's decisions
  kExpandable,  ///< a model of PyTorch's expandable segments, for replays only: no setting selects it
};

constexpr Bytes kUnlimited = std::numeric_limits<Bytes>::max();

/// Sizes with which the allocator computes stay below: more than any device has, and sums of them do not overflow.
constexpr Bytes kBeyondDevices = Bytes{1} << 56;

/// Rounding steps in each power-of-two interval, for intervals from 1 MiB to 32 GiB; 0 or 1: no rounding.
using Divisions = std::array<std::uint32_t, 16>;

struct Config {
  Growth growth = Growth::kVmm;
  Bytes max_split_size = kUnlimited;
  Bytes max_non_split_rounding = 20_MiB;
  Bytes large_segment_size = 20_MiB;
  Divisions roundup_power2_divisions{};
  double garbage_collection_threshold = 0.0;
  double memory_fraction = 1.0;
  Bytes initial_pool_size = 0;
  bool graph_capture_record_stream_reuse = false;

  friend bool operator==(const Config& a, const Config& b);
};

constexpr bool is_power_of_two(std::uint64_t value) { return value != 0 && (value & (value - 1)) == 0; }

struct Setting {
  std::string_view name;   ///< key, keyword and property
  std::string_view alias;  ///< PyTorch's key, if different; else empty
  std::variant<Growth Config::*, Bytes Config::*, double Config::*, Divisions Config::*, bool Config::*> field;
  std::string_view families;  ///< the replay's allocators with this setting, separated by spaces
  std::string_view range;     ///< in words, after "must be"; an error adds the values of the settings named here
  bool (*in_range)(const Config& config);
  std::string_view meaning;

  /// Every key of the parser. Sizes in MiB have the suffix _mb, as in PyTorch.
  std::vector<std::string> keys() const;
};

inline constexpr std::string_view kEveryFamily = "native expandable pyactcomp";

/// The settings, in the order of positional arguments and of texts.
inline constexpr Setting kSettings[] = {
    {"growth", "expandable_segments", &Config::growth, "pyactcomp", "'vmm' or 'malloc'",
     [](const Config&) { return true; },
     "`\"vmm\"`: physical memory is mapped into reserved addresses, and free pieces can move together. `\"malloc\"`: "
     "cudaMalloc, with PyTorch's decisions to the byte; needed to send tensors to processes without this allocator"},
    {"max_split_size", "", &Config::max_split_size, kEveryFamily, "at least large_segment_size",
     [](const Config& config) { return config.max_split_size >= config.large_segment_size; },
     "malloc: free memory blocks of at least this size are not split for smaller requests. vmm: requests of at least "
     "this size get segments of their own, never used for smaller requests"},
    {"max_non_split_rounding", "", &Config::max_non_split_rounding, kEveryFamily, "at least 20 MiB",
     [](const Config& config) { return config.max_non_split_rounding >= 20_MiB; },
     "how much larger than a request of at least `max_split_size` its memory block may be"},
    {"large_segment_size", "", &Config::large_segment_size, kEveryFamily,
     "a multiple of 2 MiB, above 10 MiB and below 2^56 bytes",
     [](const Config& config) {
       const Bytes size = config.large_segment_size;
       return size > 10_MiB && size < kBeyondDevices && size % 2_MiB == 0;
     },
     "malloc: the size of a segment for requests from 1 to 10 MiB. vmm: the least size of a physical handle for "
     "requests above 1 MiB"},
    {"roundup_power2_divisions", "", &Config::roundup_power2_divisions, kEveryFamily,
     "powers of two, or 0 for no rounding",
     [](const Config& config) {
       const Divisions& divisions = config.roundup_power2_divisions;
       return std::all_of(divisions.begin(), divisions.end(),
                          [](std::uint32_t each) { return each == 0 || is_power_of_two(each); });
     },
     "round sizes up to one of this many steps between two powers of two; a dict maps a size in MiB to the steps from "
     "that size on, and `\">\"` to the steps of all larger sizes"},
    {"garbage_collection_threshold", "", &Config::garbage_collection_threshold, "native pyactcomp",
     "above 0 and below 1, or 0 for never",
     [](const Config& config) {
       return config.garbage_collection_threshold >= 0 && config.garbage_collection_threshold < 1;
     },
     "give unused memory back, oldest first, once more than this share of the memory limit, or of the device's memory "
     "without a limit, is reserved"},
    {"memory_fraction", "per_process_memory_fraction", &Config::memory_fraction, kEveryFamily, "from 0 to 1",
     [](const Config& config) { return config.memory_fraction >= 0 && config.memory_fraction <= 1; },
     "the largest share of the device's memory to reserve"},
    {"initial_pool_size", "", &Config::initial_pool_size, "pyactcomp", "below 2^56 bytes",
     [](const Config& config) { return config.initial_pool_size < kBeyondDevices; },
     "reserved for the large pool at a device's first allocation"},
    {"graph_capture_record_stream_reuse", "", &Config::graph_capture_record_stream_reuse, "pyactcomp", "True or False",
     [](const Config&) { return true; },
     "reuse memory recorded on other streams within the capture of a CUDA graph, once these streams have joined; else "
     "after the capture"},
};

struct ForeignKey {
  std::string_view name, reason;
};

/// PyTorch's keys without an effect here, and the reason for each.
inline constexpr ForeignKey kForeignKeys[] = {
    {"backend", "it chooses among PyTorch's own allocators, which this one replaces"},
    {"release_lock_on_cudamalloc", "it concerns PyTorch's native allocator alone"},
    {"release_lock_on_hipmalloc", "it concerns PyTorch's native allocator alone"},
    {"throw_on_cudamalloc_oom", "an allocation that fails always raises out of memory"},
    {"expandable_segments_reserve", "addresses are reserved as they are needed"},
    {"expandable_segments_reserve_by_class", "addresses are reserved as they are needed"},
};

/// Parses PyTorch's syntax, "max_split_size_mb:512,growth:vmm", and returns `base` with these settings; keys are
/// PyTorch's wherever PyTorch has the setting. Throws std::invalid_argument naming the key or value and the accepted
/// ones.
Config parse_config(std::string_view text, Config base = {});

/// Throws std::invalid_argument unless every setting is in range.
void validate(const Config& config);

/// The settings other than the defaults, in parse_config's syntax.
std::string to_string(const Config& config);

/// "512MiB", "20 MB", "1.5GiB", "4096": bytes. Throws std::invalid_argument.
Bytes parse_bytes(std::string_view text);

/// "1.50 GiB": a size as in PyTorch's messages.
std::string format_bytes(Bytes size);

}  // namespace pac::alloc
