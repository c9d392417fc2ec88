// Settings, and the one parser of every place that takes them.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "allocator/types.hpp"

namespace pac::alloc {

enum class Growth : std::uint8_t {
  kVmm,         ///< physical handles mapped into reserved addresses: free pieces can be moved together
  kMalloc,      ///< one cudaMalloc a segment, with the native allocator's decisions
  kExpandable,  ///< the native allocator's expandable segments, modelled for replays: no setting names it
};

constexpr Bytes kUnlimited = std::numeric_limits<Bytes>::max();

struct Config {
  Growth growth = Growth::kVmm;
  /// Blocks at least this large are not split for smaller requests. At least large_segment_size; kUnlimited: every
  /// block is split.
  Bytes max_split_size = kUnlimited;
  /// How much larger than its request a block of at least max_split_size may be.
  Bytes max_non_split_rounding = 20_MiB;
  /// Segment size of requests from 1 to 10 MiB under malloc growth; the least handle of the large pool under vmm.
  Bytes large_segment_size = 20_MiB;
  /// Divisions of the power-of-two interval a size is rounded up in, for intervals from 1 MiB to 32 GiB; 0 or 1: none.
  std::array<std::uint32_t, 16> roundup_power2_divisions{};
  /// Share of the limit from which unused memory is given back by age; 0: never. Needs memory_fraction < 1.
  double garbage_collection_threshold = 0.0;
  /// Share of the device's memory that may be reserved.
  double memory_fraction = 1.0;
  /// Reserved for the large pool at the first allocation of a device.
  Bytes initial_pool_size = 0;

  friend bool operator==(const Config& a, const Config& b);
};

/// Parses PyTorch's syntax, "max_split_size_mb:512,growth:vmm", over the given settings; the keys are PyTorch's where
/// it has them. Throws std::invalid_argument that names the key or value, what is accepted, and changes nothing.
Config parse_config(std::string_view text, Config base = {});

/// Throws std::invalid_argument unless every setting is in its range.
void validate(const Config& config);

/// The settings that differ from the defaults, as parse_config takes them.
std::string to_string(const Config& config);

/// "512MiB", "20 MB", "1.5GiB", "4096": bytes. Throws std::invalid_argument.
Bytes parse_bytes(std::string_view text);

/// "1.50 GiB": as PyTorch's messages write sizes.
std::string format_bytes(Bytes size);

}  // namespace pac::alloc
