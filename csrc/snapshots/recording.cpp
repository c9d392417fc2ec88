// Longer than 400 lines: one reader, which checks every value of a snapshot.
#include "snapshots/recording.hpp"

#include <algorithm>
#include <sstream>
#include <unordered_map>

#include "allocator/history.hpp"
#include "common/salted_hash.hpp"

namespace pac::alloc {

namespace {

using Kind = Value::Kind;

// An event or a memory block takes about 30 bytes in either format; a file with more entries per byte names one object
// many times.
constexpr std::uint64_t kBytesPerEntry = 16;
constexpr std::uint64_t kEntriesOfAnyFile = 1 << 10;
constexpr std::size_t kMostDevices = 1 << 10;
constexpr std::int64_t kLimit = std::int64_t{1} << 62;  // of addresses and sizes: sums fit in 64 bits
// An event has ten keys; a dict with many more, named often, would take long to search.
constexpr std::size_t kMostKeys = 64;
constexpr std::size_t kLongestName = 40;  // of an unknown action, in the notes

/// The place of a value, for error messages alone.
struct Place {
  const char* format;  ///< with a # for each number
  std::size_t first = 0;
  std::size_t second = 0;
  const char* part = "";  ///< the part of the value at fault

  friend std::ostream& operator<<(std::ostream& out, const Place& place) {
    std::size_t number = place.first;
    for (const char* at = place.format; *at; ++at) {
      if (*at != '#') {
        out << *at;
      } else {
        out << number;
        number = place.second;
      }
    }
    return out << place.part;
  }
};

constexpr Place kRoot{"the file's content"};

struct StackHash {
  std::size_t operator()(const std::vector<std::int32_t>& stack) const {
    std::uint64_t hash = stack.size();
    for (const std::int32_t frame : stack) hash = salted_hash(hash, static_cast<std::uint32_t>(frame));
    return static_cast<std::size_t>(hash);
  }
};

struct FrameHash {
  std::size_t operator()(const RecordedFrame& frame) const {
    const std::uint64_t names = salted_hash(salted_hash(0, frame.filename.index()), frame.name.index());
    return static_cast<std::size_t>(salted_hash(names, static_cast<std::uint64_t>(frame.line)));
  }
};

struct Hex {
  std::int64_t value;
  friend std::ostream& operator<<(std::ostream& out, Hex hex) {
    return out << "0x" << std::hex << hex.value << std::dec;
  }
};

class Reader {
 public:
  Reader(const PlainData& data, const std::vector<std::string>& actions)
      : data_(data),
        left_(std::max(kEntriesOfAnyFile, data.file_size() / kBytesPerEntry)),
        frame_of_(data.containers(), -1),
        stack_of_(data.containers(), -1) {
    for (const std::string& name : actions) actions_.push_back(data.key(name));
    recording_.pools = {{0, 0}};
    recording_.stacks = {{}};
    recording_.metadata = {Value()};
    stacks_[{}] = 0;
    pools_[{0, 0}] = 0;
  }

  Recording read();

 private:
  std::string described(Value value) const;
  const std::vector<Value>& list(Value value, const Place& place, const char* key = nullptr) const;
  Value dict(Value value, const Place& place) const;
  Value field(Value dict, const char* name, Value key, const Place& place) const;
  std::int64_t checked(Value value, const char* name, const Place& place, std::int64_t least = 0) const;
  Value string(Value dict, const char* name, Value key, const Place& place) const;
  /// An optional field; `missing` is the default.
  std::int64_t integer(Value dict, const char* name, Value key, const Place& place, std::int64_t missing) const;
  bool boolean(Value dict, const char* name, const Place& place) const;

  void count(std::size_t entries);
  std::int32_t pool(Value value, const Place& place);
  std::int32_t stack(const Value* frames, const Place& place);
  std::int32_t frame(Value value, const Place& place);
  std::int32_t metadata(const Value* text, RecordedEvents& events);
  RecordedEvents events(Value trace, std::size_t device);
  std::uint8_t action(Value name, RecordedEvents& events) const;
  void place_event(Value event, RecordedEvents& events, const Place& place) const;
  RecordedSegment segment(Value value, std::size_t number);
  RecordedBlock block(Value value, const Place& place, std::int64_t expected);
  /// The last allocation of a block; nullptr if newer versions' fields name it.
  const Value* last_allocation(Value block) const;
  const std::vector<Value>& bare_segments() const;
  void check_blocks(const RecordedSegment& segment, std::size_t number) const;

  const PlainData& data_;
  std::uint64_t left_;  // entries still allowed
  Recording recording_;
  std::vector<Value> actions_;
  std::vector<std::int32_t> frame_of_, stack_of_;  // by container: a container named twice is read once
  std::unordered_map<RecordedFrame, std::int32_t, FrameHash> frames_;
  std::unordered_map<std::vector<std::int32_t>, std::int32_t, StackHash> stacks_;
  std::map<std::pair<std::int64_t, std::int64_t>, std::int32_t> pools_;
  std::unordered_map<std::size_t, std::int32_t> metadata_texts_;  // by the string's index

  const Value action_ = data_.key("action"), addr_ = data_.key("addr"), size_ = data_.key("size"),
              stream_ = data_.key("stream"), time_ = data_.key("time_us"), pool_ = data_.key("pool_id"),
              segment_pool_ = data_.key("segment_pool_id"), frames_key_ = data_.key("frames"),
              free_ = data_.key("device_free"), metadata_ = data_.key("user_metadata"), address_ = data_.key("address"),
              filename_ = data_.key("filename"), line_ = data_.key("line"), name_ = data_.key("name"),
              state_ = data_.key("state"), requested_ = data_.key("requested_size"), blocks_ = data_.key("blocks"),
              total_size_ = data_.key("total_size"), type_ = data_.key("segment_type"), device_ = data_.key("device"),
              history_ = data_.key("history"), real_size_ = data_.key("real_size"),
              original_ = data_.key("fx_original_trace");
};

// ---- checked values ----

std::string Reader::described(Value value) const {
  std::ostringstream text;
  switch (value.kind()) {
    case Kind::kNone:
      return "None";
    case Kind::kTrue:
      return "True";
    case Kind::kFalse:
      return "False";
    case Kind::kInteger:
      text << data_.integer(value);
      break;
    case Kind::kFloat:
      text << data_.number(value);
      break;
    case Kind::kString:
      text << '\'';
      for (const char character : data_.text(value).substr(0, kLongestName)) {
        text << (character >= ' ' && character <= '~' ? character : '?');
      }
      text << '\'';
      break;
    case Kind::kList:
      return "a list";
    case Kind::kTuple:
      return "a tuple";
    case Kind::kDict:
      return "a dict";
  }
  return text.str();
}

const std::vector<Value>& Reader::list(Value value, const Place& place, const char* key) const {
  if (value.is(Kind::kList)) return data_.items(value);
  if (key) refuse(place, ": '", key, "' is ", described(value), ", expected a list");
  refuse(place, " is ", described(value), ", expected a list");
}

Value Reader::dict(Value value, const Place& place) const {
  if (!value.is(Kind::kDict)) refuse(place, " is ", described(value), ", expected a dict");
  const std::size_t keys = data_.items(value).size() / 2;
  expect(keys <= kMostKeys, place, " has ", keys, " keys, expected at most ", kMostKeys);
  return value;
}

Value Reader::field(Value dict, const char* name, Value key, const Place& place) const {
  const Value* found = data_.find(dict, key);
  expect(found, place, " has no '", name, "'");
  return *found;
}

std::int64_t Reader::checked(Value value, const char* name, const Place& place, std::int64_t least) const {
  if (value.is(Kind::kInteger)) {
    const std::int64_t integer = data_.integer(value);
    if (integer >= least && integer < kLimit) return integer;
  }
  refuse(place, ": '", name, "' is ", described(value), ", expected an integer from ", least, " to below 2**62");
}

std::int64_t Reader::integer(Value dict, const char* name, Value key, const Place& place, std::int64_t missing) const {
  const Value* found = data_.find(dict, key);
  return found ? checked(*found, name, place) : missing;
}

Value Reader::string(Value dict, const char* name, Value key, const Place& place) const {
  const Value value = field(dict, name, key, place);
  if (!value.is(Kind::kString)) refuse(place, ": '", name, "' is ", described(value), ", expected a string");
  return value;
}

bool Reader::boolean(Value dict, const char* name, const Place& place) const {
  const Value* found = data_.find(dict, data_.key(name));
  if (!found || found->is(Kind::kFalse)) return false;
  if (!found->is(Kind::kTrue)) refuse(place, ": '", name, "' is ", described(*found), ", expected a bool");
  return true;
}

// ---- fields of events and blocks ----

void Reader::count(std::size_t entries) {
  expect(entries <= left_,
         "more events and blocks than a file of this size holds, unless the file names one many times");
  left_ -= entries;
}

std::int32_t Reader::pool(Value value, const Place& place) {
  const bool is_pair = (value.is(Kind::kList) || value.is(Kind::kTuple)) && data_.items(value).size() == 2 &&
                       data_.items(value)[0].is(Kind::kInteger) && data_.items(value)[1].is(Kind::kInteger);
  if (!is_pair) refuse(place, ": the pool's id is ", described(value), ", expected two integers");
  const std::pair<std::int64_t, std::int64_t> id{checked(data_.items(value)[0], "pool_id", place),
                                                 checked(data_.items(value)[1], "pool_id", place)};
  const auto [known, is_new] = pools_.emplace(id, static_cast<std::int32_t>(recording_.pools.size()));
  if (is_new) recording_.pools.push_back(id);
  return known->second;
}

std::int32_t Reader::stack(const Value* frames, const Place& place) {
  if (!frames || data_.is_empty(*frames)) return 0;
  const std::vector<Value>& lines = list(*frames, place, "frames");
  std::int32_t& known = stack_of_[frames->index()];
  if (known >= 0) return known;
  std::vector<std::int32_t> numbers;
  numbers.reserve(lines.size());
  for (const Value line : lines) numbers.push_back(frame(line, place));
  const auto [at, is_new] = stacks_.emplace(std::move(numbers), static_cast<std::int32_t>(recording_.stacks.size()));
  if (is_new) recording_.stacks.push_back(at->first);
  known = at->second;
  return known;
}

std::int32_t Reader::frame(Value value, const Place& place) {
  if (value.is(Kind::kDict) && frame_of_[value.index()] >= 0) return frame_of_[value.index()];
  Place here = place;
  here.part = ": a stack frame";
  const Value entry = dict(value, here);
  const Value* original = data_.find(entry, original_);
  const RecordedFrame frame{
      string(entry, "filename", filename_, here), checked(field(entry, "line", line_, here), "line", here, -1),
      string(entry, "name", name_, here), original && original->is(Kind::kString) ? *original : Value()};
  const auto [at, is_new] = frames_.emplace(frame, static_cast<std::int32_t>(recording_.frames.size()));
  if (is_new) recording_.frames.push_back(frame);
  return frame_of_[value.index()] = at->second;
}

// ---- events ----

std::uint8_t Reader::action(Value name, RecordedEvents& events) const {
  const auto found = std::find(actions_.begin(), actions_.end(), name);
  if (found == actions_.end()) ++events.unknown[data_.text(name).substr(0, kLongestName)];
  return static_cast<std::uint8_t>(found - actions_.begin());
}

/// Adds an event's address and size; some kinds of event lack one.
void Reader::place_event(Value event, RecordedEvents& events, const Place& place) const {
  const auto action = static_cast<Action>(events.action.back());
  if (action <= Action::kSegmentUnmap) {
    events.address.push_back(checked(field(event, "addr", addr_, place), "addr", place));
    events.size.push_back(checked(field(event, "size", size_, place), "size", place));
    return;
  }
  if (action == Action::kOutOfMemory) {
    events.address.push_back(integer(event, "device_free", free_, place, integer(event, "addr", addr_, place, 0)));
    events.size.push_back(checked(field(event, "size", size_, place), "size", place));
    return;
  }
  const auto positive = [&](const char* name, Value key) {
    const Value* found = data_.find(event, key);
    return found ? std::max<std::int64_t>(0, checked(*found, name, place, -kLimit)) : 0;
  };
  events.address.push_back(positive("addr", addr_));
  events.size.push_back(positive("size", size_));
}

std::int32_t Reader::metadata(const Value* text, RecordedEvents& events) {
  if (!text || data_.is_empty(*text)) return 0;
  if (!text->is(Kind::kString)) {
    ++events.other_metadata;
    return 0;
  }
  const auto [known, is_new] =
      metadata_texts_.emplace(text->index(), static_cast<std::int32_t>(recording_.metadata.size()));
  if (is_new) recording_.metadata.push_back(*text);
  return known->second;
}

RecordedEvents Reader::events(Value trace, std::size_t device) {
  const std::vector<Value>& entries = data_.items(trace);
  RecordedEvents events;
  events.action.reserve(entries.size());
  for (auto* column : {&events.address, &events.size, &events.stream, &events.time_us}) column->reserve(entries.size());
  for (auto* column : {&events.pool, &events.stack, &events.metadata}) column->reserve(entries.size());
  for (std::size_t index = 0; index < entries.size(); ++index) {
    const Place place{"device_traces[#], event #", device, index};
    const Value event = dict(entries[index], place);
    events.action.push_back(action(string(event, "action", action_, place), events));
    place_event(event, events, place);
    events.stream.push_back(integer(event, "stream", stream_, place, 0));
    events.time_us.push_back(integer(event, "time_us", time_, place, 0));
    if (index > 0 && events.time_us[index] < events.time_us[index - 1] && ++events.backwards == 1) {
      events.first_backwards = index;
    }
    const Value* id = data_.find(event, pool_);
    if (!id) id = data_.find(event, segment_pool_);
    events.has_pools = events.has_pools || id != nullptr;
    events.pool.push_back(id ? pool(*id, place) : 0);
    events.stack.push_back(stack(data_.find(event, frames_key_), place));
    events.metadata.push_back(metadata(data_.find(event, metadata_), events));
  }
  return events;
}

// ---- segments ----

RecordedSegment Reader::segment(Value value, std::size_t number) {
  const Place place{"segments[#]", number};
  const Value entry = dict(value, place);
  const std::vector<Value>& blocks = list(field(entry, "blocks", blocks_, place), place, "blocks");
  count(blocks.size());
  RecordedSegment segment;
  segment.address = checked(field(entry, "address", address_, place), "address", place);
  segment.size = checked(field(entry, "total_size", total_size_, place), "total_size", place);
  const Value kind = string(entry, "segment_type", type_, place);
  segment.small = data_.text(kind) == "small";
  if (!segment.small && data_.text(kind) != "large") {
    refuse(place, ": 'segment_type' is ", described(kind), ", expected small or large");
  }
  segment.expandable = boolean(entry, "is_expandable", place);
  segment.stream = checked(field(entry, "stream", stream_, place), "stream", place);
  const Value* id = data_.find(entry, segment_pool_);
  segment.pool = id ? pool(*id, place) : 0;
  segment.stack = stack(data_.find(entry, frames_key_), place);
  segment.device = integer(entry, "device", device_, place, 0);
  expect(segment.device < static_cast<std::int64_t>(kMostDevices), "a segment of device ", segment.device,
         ", expected at most ", kMostDevices, " devices");
  std::int64_t at = segment.address;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    segment.blocks.push_back(block(blocks[i], {"segments[#], block #", number, i}, at));
    at = std::min(kLimit, segment.blocks.back().address + segment.blocks.back().size);
  }
  check_blocks(segment, number);
  return segment;
}

const Value* Reader::last_allocation(Value block) const {
  // torch 2.0 and earlier list the allocations that a block was made from, the last one first.
  const Value* history = data_.find(block, history_);
  const bool known = history && history->is(Kind::kList) && !data_.is_empty(*history);
  return known && data_.items(*history)[0].is(Kind::kDict) ? &data_.items(*history)[0] : nullptr;
}

RecordedBlock Reader::block(Value value, const Place& place, std::int64_t expected) {
  const Value entry = dict(value, place);
  const Value state = string(entry, "state", state_, place);
  const std::string& name = data_.text(state);
  RecordedBlock block;
  block.pending = name == "active_pending_free" || name == "active_awaiting_free";
  block.active = block.pending || name == "active_allocated";
  if (!block.active && name != "inactive") {
    refuse(place, ": 'state' is ", described(state),
           ", expected inactive, active_allocated, active_pending_free or active_awaiting_free");
  }
  // Blocks lie one after the other, so older versions left the address out.
  block.address = integer(entry, "address", address_, place, expected);
  block.size = checked(field(entry, "size", size_, place), "size", place);
  const Value* last = last_allocation(entry);
  const std::int64_t asked = last ? integer(*last, "real_size", real_size_, place, block.size) : block.size;
  // A free block keeps the size of the last request, even if split smaller since.
  block.requested = block.active ? integer(entry, "requested_size", requested_, place, asked) : 0;
  expect(block.requested <= block.size, place, ": ", block.requested, " bytes were requested of a block of ",
         block.size);
  const Value* frames = data_.find(entry, frames_key_);
  if (!frames && last) frames = data_.find(*last, frames_key_);
  block.stack = stack(frames, place);
  return block;
}

/// The blocks cover their segment, in order and without a gap.
void Reader::check_blocks(const RecordedSegment& segment, std::size_t number) const {
  std::int64_t expected = segment.address;
  for (std::size_t i = 0; i < segment.blocks.size(); ++i) {
    const RecordedBlock& block = segment.blocks[i];
    if (block.address != expected || block.size == 0) {
      refuse(Place{"segments[#], block #", number, i}, ": ", block.size, " bytes at ", Hex{block.address},
             ", expected one at ", Hex{expected}, ", as blocks lie one after the other");
    }
    expected += block.size;
    expect(expected < kLimit, Place{"segments[#], block #", number, i}, " ends beyond 2**62");
  }
  if (expected != segment.address + segment.size) {
    refuse(Place{"segments[#]", number}, ": its blocks hold ", expected - segment.address, " bytes, its total_size is ",
           segment.size);
  }
}

/// The list of segments that torch.cuda.memory_snapshot() returns.
const std::vector<Value>& Reader::bare_segments() const {
  const std::vector<Value>& segments = data_.items(data_.root);
  expect(!segments.empty(),
         "an empty list, as torch.cuda.memory_snapshot() returns while no memory is reserved: write the file with "
         "torch.cuda.memory._dump_snapshot, while the memory is there");
  expect(segments[0].is(Kind::kDict) && data_.find(segments[0], blocks_),
         "the file's content is a list, expected a dict of torch.cuda.memory._snapshot() or the segments of "
         "torch.cuda.memory_snapshot()");
  return segments;
}

Recording Reader::read() {
  static const std::vector<Value> kNone;
  const bool bare = data_.root.is(Kind::kList);
  const Value root = bare ? data_.root : dict(data_.root, kRoot);
  if (!bare && data_.find(root, data_.key("traceEvents"))) {
    refuse("a trace of torch.profiler, not a memory snapshot: write one with torch.cuda.memory._dump_snapshot");
  }
  const std::vector<Value>& traces =
      bare ? kNone : list(field(root, "device_traces", data_.key("device_traces"), kRoot), {"device_traces"});
  const std::vector<Value>& segments =
      bare ? bare_segments() : list(field(root, "segments", data_.key("segments"), kRoot), {"segments"});
  expect(traces.size() <= kMostDevices, "device_traces has ", traces.size(), " devices, expected at most ",
         kMostDevices);
  for (std::size_t i = 0; i < traces.size(); ++i) count(list(traces[i], {"device_traces[#]", i}).size());
  count(segments.size());
  for (std::size_t i = 0; i < segments.size(); ++i) recording_.segments.push_back(segment(segments[i], i));
  for (std::size_t i = 0; i < traces.size(); ++i) recording_.events.push_back(events(traces[i], i));
  return std::move(recording_);
}

}  // namespace

Recording read_recording(const PlainData& data, const std::vector<std::string>& actions) {
  return Reader(data, actions).read();
}

}  // namespace pac::alloc
