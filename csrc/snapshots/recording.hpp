// A PyTorch memory snapshot as columns and tables, from the parsed data of the file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "snapshots/plain_data.hpp"

namespace pac::alloc {

/// A device's events in order, one entry per event in every column.
struct RecordedEvents {
  std::vector<std::uint8_t> action;
  std::vector<std::int64_t> address;  ///< of an oom event the device's free bytes
  std::vector<std::int64_t> size;
  std::vector<std::int64_t> stream;
  std::vector<std::int64_t> time_us;
  std::vector<std::int32_t> pool;
  std::vector<std::int32_t> stack;
  std::vector<std::int32_t> metadata;  ///< into Recording::metadata
  bool has_pools = false;
  std::map<std::string, std::size_t> unknown;  ///< number of events of each unknown action
  std::size_t other_metadata = 0;              ///< number of events whose user_metadata is no text
  std::size_t backwards = 0;                   ///< number of events earlier than the one before
  std::size_t first_backwards = 0;             ///< the first of them
};

struct RecordedBlock {
  std::int64_t address = 0, size = 0, requested = 0;
  bool active = false, pending = false;
  std::int32_t stack = 0;
};

struct RecordedSegment {
  std::int64_t device = 0, address = 0, size = 0, stream = 0;
  std::int32_t pool = 0;
  bool small = false, expandable = false;
  std::int32_t stack = 0;
  std::vector<RecordedBlock> blocks;
};

struct RecordedFrame {
  Value filename;
  std::int64_t line = 0;
  Value name;
  Value original;  ///< of generated code: the program's own lines, as Python prints a traceback; else None

  friend bool operator==(const RecordedFrame& a, const RecordedFrame& b) {
    return a.filename == b.filename && a.line == b.line && a.name == b.name && a.original == b.original;
  }
};

struct Recording {
  std::vector<RecordedEvents> events;  ///< of each device
  std::vector<RecordedSegment> segments;
  std::vector<RecordedFrame> frames;
  std::vector<std::vector<std::int32_t>> stacks;             ///< stack 0 is empty
  std::vector<std::pair<std::int64_t, std::int64_t>> pools;  ///< pool 0 is (0, 0)
  std::vector<Value> metadata;                               ///< texts of user_metadata; entry 0, None, is no text
};

/// Throws std::invalid_argument, naming the place, if the data is no snapshot. `actions`: the known names, in the order
/// of their numbers; any other name gets the next number.
Recording read_recording(const PlainData& data, const std::vector<std::string>& actions);

}  // namespace pac::alloc
