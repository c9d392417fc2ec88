#include "snapshots/plain_data.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <system_error>

namespace pac::alloc {

namespace {

constexpr std::size_t kPiece = std::size_t{1} << 20;

// Limits of any file, however short. In a snapshot each value takes two bytes or more, and each list or dict about 19;
// without a limit one byte of the file could take 56 bytes of memory.
constexpr std::uint64_t kOfAnyFile = 1 << 14;
constexpr std::uint64_t kBytesPerValue = 2;
constexpr std::uint64_t kBytesPerContainer = 8;

// This bit of the 60 marks an index into integers_.
constexpr std::int64_t kSmallIntegers = std::int64_t{1} << 58;
constexpr std::uint64_t kWide = std::uint64_t{1} << 59;

}  // namespace

PlainData::PlainData(std::uint64_t size)
    : file_size_(size),
      most_values_(std::max(kOfAnyFile, size / kBytesPerValue)),
      values_left_(most_values_),
      containers_left_(std::max(kOfAnyFile, size / kBytesPerContainer)) {}

Value PlainData::add_integer(std::int64_t value) {
  if (value >= -kSmallIntegers && value < kSmallIntegers) {
    return Value(Value::Kind::kInteger, static_cast<std::uint64_t>(value + kSmallIntegers));
  }
  integers_.push_back(value);
  return Value(Value::Kind::kInteger, kWide | (integers_.size() - 1));
}

std::int64_t PlainData::integer(Value value) const {
  const std::uint64_t index = value.index();
  if ((index & kWide) != 0) return integers_[index & ~kWide];
  return static_cast<std::int64_t>(index) - kSmallIntegers;
}

Value PlainData::add_float(double value) {
  floats_.push_back(value);
  return Value(Value::Kind::kFloat, floats_.size() - 1);
}

Value PlainData::add_string(std::string_view text) {
  const auto known = numbers_.find(text);
  if (known != numbers_.end()) return Value(Value::Kind::kString, known->second);
  strings_.emplace_back(text);
  numbers_.emplace(strings_.back(), strings_.size() - 1);
  return Value(Value::Kind::kString, strings_.size() - 1);
}

Value PlainData::add_container(Value::Kind kind, const Value* begin, const Value* end) {
  expect(containers_left_ > 0, "more dicts, lists and tuples than a snapshot of this size holds");
  --containers_left_;
  items_.emplace_back(begin, end);
  return Value(kind, items_.size() - 1);
}

void PlainData::append(Value container, const Value* begin, const Value* end) {
  std::vector<Value>& items = items_[container.index()];
  items.insert(items.end(), begin, end);
}

void PlainData::count_value() {
  expect(values_left_ > 0, "more values than a snapshot of this size holds");
  --values_left_;
}

Value PlainData::key(std::string_view text) const {
  const auto known = numbers_.find(text);
  return known == numbers_.end() ? Value() : Value(Value::Kind::kString, known->second);
}

bool PlainData::is_empty(Value value) const {
  switch (value.kind()) {
    case Value::Kind::kNone:
    case Value::Kind::kFalse:
      return true;
    case Value::Kind::kTrue:
      return false;
    case Value::Kind::kInteger:
      return integer(value) == 0;
    case Value::Kind::kFloat:
      return number(value) == 0;
    case Value::Kind::kString:
      return text(value).empty();
    default:
      return items(value).empty();
  }
}

const Value* PlainData::find(Value dict, Value key) const {
  const std::vector<Value>& items = this->items(dict);
  // The last value of a repeated key counts.
  for (std::size_t i = items.size(); i > 0; i -= 2) {
    if (items[i - 2] == key) return &items[i - 1];
  }
  return nullptr;
}

void Input::refill(std::size_t count) {
  if (between_) between_();
  std::copy(buffer_.begin() + static_cast<std::ptrdiff_t>(at_), buffer_.begin() + static_cast<std::ptrdiff_t>(end_),
            buffer_.begin());
  start_ += at_;
  end_ -= at_;
  at_ = 0;
  if (buffer_.size() < count + kPiece) buffer_.resize(count + kPiece);
  while (end_ < count) {
    const ::ssize_t got = ::read(descriptor_, buffer_.data() + end_, buffer_.size() - end_);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw std::system_error(errno, std::generic_category(), "read");
    if (got == 0) return;
    end_ += static_cast<std::size_t>(got);
  }
}

void Input::throw_cut_off() const { refuse("cut off after ", start_ + end_, " bytes"); }

}  // namespace pac::alloc
