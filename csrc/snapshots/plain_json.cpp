// JSON in UTF-8.
#include <charconv>
#include <string>
#include <system_error>

#include "snapshots/plain_data.hpp"

namespace pac::alloc {

namespace {

using Kind = Value::Kind;

// A snapshot's are at most six deep, annotations apart.
constexpr std::size_t kDeepest = 100;
// A double has at most 24 characters, unless some are of no use.
constexpr std::size_t kLongestWord = 400;

void append_utf8(std::string& text, std::uint32_t point) {
  const auto put = [&text](std::uint32_t byte) { text.push_back(static_cast<char>(static_cast<unsigned char>(byte))); };
  if (point < 0x80) return put(point);
  if (point < 0x800) {
    put(0xC0 | point >> 6);
  } else {
    if (point < 0x10000) {
      put(0xE0 | point >> 12);
    } else {
      put(0xF0 | point >> 18);
      put(0x80 | (point >> 12 & 0x3F));
    }
    put(0x80 | (point >> 6 & 0x3F));
  }
  put(0x80 | (point & 0x3F));
}

class JsonReader {
 public:
  JsonReader(Input& input, PlainData& data) : input_(input), data_(data) {}

  void read() {
    do {
      value();
      // What a value ends may end what holds it.
      while (!open_.empty() && close()) {
      }
    } while (!open_.empty());
    data_.root = stack_.back();
    expect(next() < 0, "something follows what began first");
  }

 private:
  /// A list or dict that has begun.
  struct Open {
    Kind kind;
    std::size_t begin;
  };

  /// The character after white space, which is not taken; -1 at the end.
  int next() {
    while (true) {
      const int character = input_.peek();
      if (character != ' ' && character != '\n' && character != '\r' && character != '\t') return character;
      input_.take(1);
    }
  }

  void push(Value value) {
    data_.count_value();
    stack_.push_back(value);
  }

  void value() {
    // A list or dict that begins leads to its first value.
    while (true) {
      const int first = next();
      if (first == '"') return push(string());
      if (first != '[' && first != '{') return push(word());
      const Kind kind = first == '[' ? Kind::kList : Kind::kDict;
      input_.take(1);
      expect(open_.size() < kDeepest, "lists or objects nested deeper than any snapshot's");
      open_.push_back({kind, stack_.size()});
      if (next() == (kind == Kind::kList ? ']' : '}')) return;
      if (kind == Kind::kDict) key();
    }
  }

  /// Goes on to the next value of what is open, or ends it: then true.
  bool close() {
    const Open open = open_.back();
    const int character = next();
    if (character >= 0) input_.take(1);
    const char end = open.kind == Kind::kList ? ']' : '}';
    if (character == ',' && stack_.size() > open.begin) {
      if (open.kind == Kind::kDict) key();
      return false;
    }
    expect(character == end, "a comma or ", end, " is missing");
    const Value made = data_.add_container(open.kind, stack_.data() + open.begin, stack_.data() + stack_.size());
    stack_.resize(open.begin);
    open_.pop_back();
    push(made);
    return true;
  }

  void key() {
    expect(next() == '"', "a key is no string");
    push(string());
    expect(next() == ':', "a colon is missing");
    input_.take(1);
  }

  Value string() {
    input_.take(1);
    text_.clear();
    high_ = 0;
    for (std::uint8_t character = input_.byte(); character != '"'; character = input_.byte()) {
      expect(text_.size() < kLongestString, "a string of ", text_.size(), " bytes");
      if (character == '\\') {
        escape();
      } else {
        text_.push_back(static_cast<char>(character));
      }
    }
    return data_.add_string(text_);
  }

  void escape() {
    const std::uint8_t character = input_.byte();
    switch (character) {
      case 'b':
        return text_.push_back('\b');
      case 'f':
        return text_.push_back('\f');
      case 'n':
        return text_.push_back('\n');
      case 'r':
        return text_.push_back('\r');
      case 't':
        return text_.push_back('\t');
      case '"':
      case '\\':
      case '/':
        return text_.push_back(static_cast<char>(character));
      case 'u':
        break;
      default:
        refuse("an escape that there is not");
    }
    const std::uint32_t point = hexadecimal();
    if (point >= 0xDC00 && point < 0xE000 && high_ != 0 && text_.size() == high_end_) {
      text_.resize(text_.size() - 3);
      append_utf8(text_, 0x10000 + ((high_ - 0xD800) << 10) + (point - 0xDC00));
      high_ = 0;
    } else {
      const bool is_half = point >= 0xD800 && point < 0xE000;
      append_utf8(text_, is_half ? 0xFFFD : point);
      high_ = is_half && point < 0xDC00 ? point : 0;
      high_end_ = text_.size();
    }
  }

  std::uint32_t hexadecimal() {
    const auto* digits = reinterpret_cast<const char*>(input_.take(4));
    std::uint32_t value = 0;
    const auto [end, error] = std::from_chars(digits, digits + 4, value, 16);
    expect(error == std::errc() && end == digits + 4, "an escape that there is not");
    return value;
  }

  Value word() {
    text_.clear();
    for (int character = input_.peek(); is_of_word(character); character = input_.peek()) {
      expect(text_.size() < kLongestWord, "a huge integer or other word");
      text_.push_back(static_cast<char>(input_.byte()));
    }
    if (text_ == "null") return Value(Kind::kNone);
    if (text_ == "true") return Value(Kind::kTrue);
    if (text_ == "false") return Value(Kind::kFalse);
    expect(!text_.empty(), "a value is missing");
    const char* const begin = text_.data();
    const char* const end = begin + text_.size();
    const bool starts_right = *begin == '-' || (*begin >= '0' && *begin <= '9');
    if (text_.find_first_not_of("0123456789", *begin == '-' ? 1 : 0) == std::string::npos) {
      std::int64_t integer = 0;
      auto [stop, error] = std::from_chars(begin, end, integer);
      if (error == std::errc::result_out_of_range) {
        std::uint64_t bits = 0;  // as a pickle has them of a frame without a line
        error = std::from_chars(begin, end, bits).ec;
        integer = static_cast<std::int64_t>(bits);
      }
      expect(error != std::errc::result_out_of_range, "a huge integer: ", text_.substr(0, 40));
      if (stop == end && error == std::errc()) return data_.add_integer(integer);
    } else if (starts_right) {
      double number = 0;
      const auto [stop, error] = std::from_chars(begin, end, number);
      if (stop == end && error == std::errc()) return data_.add_float(number);
    }
    refuse(text_.substr(0, 40), " is no number");
  }

  static bool is_of_word(int character) {
    return (character >= '0' && character <= '9') || (character >= 'a' && character <= 'z') ||
           (character >= 'A' && character <= 'Z') || character == '+' || character == '-' || character == '.';
  }

  Input& input_;
  PlainData& data_;
  std::vector<Value> stack_;
  std::vector<Open> open_;
  std::string text_;          // of the string or word that is being read
  std::uint32_t high_ = 0;    // the half of a pair of surrogates that came last, as a replacement character
  std::size_t high_end_ = 0;  // where it ends in the text
};

}  // namespace

void read_json(Input& input, PlainData& data) {
  try {
    JsonReader(input, data).read();
  } catch (const std::invalid_argument& error) {
    refuse("not JSON, or cut off: ", error.what(), " (byte ", input.position(), ")");
  }
}

}  // namespace pac::alloc
