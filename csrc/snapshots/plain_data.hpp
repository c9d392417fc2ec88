// The parsed data of a file: dicts, lists, tuples, numbers, strings, booleans and None, and nothing else.
//
// Reading runs and imports nothing, does not recurse, and takes memory proportional to the file. A value stored once in
// a pickle and named twice is stored once here too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace pac::alloc {

/// Refuses a file's content; the message describes the file, not this program.
template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

template <class... Parts>
void expect(bool condition, const Parts&... parts) {
  if (!condition) refuse(parts...);
}

/// None, a boolean or a small integer; or the index of a string, a number or a container's items in PlainData.
class Value {
 public:
  enum class Kind : std::uint8_t { kNone, kFalse, kTrue, kInteger, kFloat, kString, kList, kTuple, kDict };

  Value() = default;
  explicit Value(Kind kind, std::uint64_t index = 0) : bits_(index << 4 | static_cast<std::uint64_t>(kind)) {}

  Kind kind() const { return static_cast<Kind>(bits_ & 15); }
  std::size_t index() const { return static_cast<std::size_t>(bits_ >> 4); }
  bool is(Kind other) const { return kind() == other; }
  friend bool operator==(Value a, Value b) { return a.bits_ == b.bits_; }

 private:
  std::uint64_t bits_ = 0;
};

class PlainData {
 public:
  /// `size`: bytes of the file, which limit the number of values. Adding more throws std::invalid_argument.
  explicit PlainData(std::uint64_t size);

  Value root;

  Value add_integer(std::int64_t value);
  Value add_float(double value);
  Value add_string(std::string_view text);
  /// A list, tuple or dict; a dict's items are keys and values in turn.
  Value add_container(Value::Kind kind, const Value* begin = nullptr, const Value* end = nullptr);
  void append(Value container, const Value* begin, const Value* end);
  /// Counts one value of the file.
  void count_value();
  /// How many values the file may have.
  std::uint64_t most_values() const { return most_values_; }

  std::uint64_t file_size() const { return file_size_; }
  std::size_t containers() const { return items_.size(); }
  std::int64_t integer(Value value) const;
  double number(Value value) const { return floats_[value.index()]; }
  const std::string& text(Value value) const { return strings_[value.index()]; }
  const std::vector<Value>& items(Value container) const { return items_[container.index()]; }
  /// A string as the key of a dict; None, which is never a key, if the data has no such string.
  Value key(std::string_view text) const;
  /// Whether the value is false in Python.
  bool is_empty(Value value) const;
  /// nullptr if the dict has no such key.
  const Value* find(Value dict, Value key) const;

 private:
  std::uint64_t file_size_;
  std::uint64_t most_values_;
  std::uint64_t values_left_;
  std::uint64_t containers_left_;
  std::vector<std::int64_t> integers_;  // integers too large for a Value
  std::vector<double> floats_;
  std::deque<std::string> strings_;
  std::unordered_map<std::string_view, std::uint64_t> numbers_;  // index of each string
  std::vector<std::vector<Value>> items_;
};

/// Reads a file from the beginning, in pieces.
class Input {
 public:
  /// `between`: called between pieces; an exception from there ends the reading.
  Input(int descriptor, std::function<void()> between) : descriptor_(descriptor), between_(std::move(between)) {}

  /// The next `count` bytes, valid until the next call. Throws std::invalid_argument if the file ends before.
  const std::uint8_t* take(std::size_t count) {
    if (end_ - at_ < count) refill(count);
    if (end_ - at_ < count) throw_cut_off();
    at_ += count;
    return buffer_.data() + at_ - count;
  }
  std::uint8_t byte() { return *take(1); }
  std::uint64_t position() const { return start_ + at_; }

 private:
  void refill(std::size_t count);
  [[noreturn]] void throw_cut_off() const;

  int descriptor_;
  std::function<void()> between_;
  std::vector<std::uint8_t> buffer_;
  std::size_t at_ = 0;
  std::size_t end_ = 0;
  std::uint64_t start_ = 0;
};

constexpr std::size_t kLongestString = std::size_t{1} << 24;

/// Reads a pickle. Throws std::invalid_argument, naming the byte, if the file is cut off or holds any other type of
/// value.
void read_pickle(Input& input, PlainData& data);

}  // namespace pac::alloc
