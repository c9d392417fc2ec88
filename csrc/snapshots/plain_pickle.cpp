// Reads pickles of protocol 2 to 5. Opcodes that import or call are refused, so no file can run anything; nor can a
// file make the memo, a string or an integer longer than the file.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "snapshots/plain_data.hpp"

namespace pac::alloc {

namespace {

using Kind = Value::Kind;

/// Name and effect of a refused opcode; nullptr if there is no such opcode.
const char* refused(std::uint8_t opcode) {
  switch (opcode) {
    case 'c':
      return "GLOBAL, which imports";
    case 0x93:
      return "STACK_GLOBAL, which imports";
    case 'R':
      return "REDUCE, which calls";
    case 'b':
      return "BUILD, which calls";
    case 'i':
      return "INST, which imports and calls";
    case 'o':
      return "OBJ, which calls";
    case 0x81:
      return "NEWOBJ, which calls";
    case 0x92:
      return "NEWOBJ_EX, which calls";
    case 'P':
      return "PERSID, an outside object";
    case 'Q':
      return "BINPERSID, an outside object";
    case 0x82:
      return "EXT1, a registered object";
    case 0x83:
      return "EXT2, a registered object";
    case 0x84:
      return "EXT4, a registered object";
    case 'U':
      return "SHORT_BINSTRING, bytes";
    case 'T':
      return "BINSTRING, bytes";
    case 'C':
      return "SHORT_BINBYTES, bytes";
    case 'B':
      return "BINBYTES, bytes";
    case 0x8E:
      return "BINBYTES8, bytes";
    case 0x96:
      return "BYTEARRAY8, bytes";
    case 0x8B:
      return "LONG4, an integer of more than 64 bits";
    case 0x8D:
      return "BINUNICODE8, a string of gigabytes";
    case 0x8F:
      return "EMPTY_SET, a set";
    case 0x91:
      return "FROZENSET, a set";
    case '0':
      return "POP, which drops a value";
    case '1':
      return "POP_MARK, which drops values";
    case '2':
      return "DUP, which repeats a value";
    default:
      return nullptr;
  }
}

class PickleReader {
 public:
  PickleReader(Input& input, PlainData& data) : input_(input), data_(data) {}

  void read() {
    expect(input_.byte() == 0x80, "not a pickle of protocol 2 to 5");
    const std::uint8_t protocol = input_.byte();
    expect(protocol >= 2 && protocol <= 5, "not a pickle of protocol 2 to 5");
    while (step(input_.byte())) {
    }
    expect(marks_.empty() && stack_.size() == 1, "STOP before the data is complete");
    data_.root = stack_.back();
  }

 private:
  bool step(std::uint8_t opcode);

  std::uint64_t unsigned_integer(std::size_t width) {
    const std::uint8_t* bytes = input_.take(width);
    std::uint64_t value = 0;
    for (std::size_t i = width; i > 0; --i) value = value << 8 | bytes[i - 1];
    return value;
  }

  /// A two's complement integer of `width` bytes, fewer than eight too.
  std::int64_t signed_integer(std::size_t width) {
    if (width == 0) return 0;
    const std::uint64_t value = unsigned_integer(width);
    const std::uint64_t sign = std::uint64_t{1} << (8 * width - 1);
    return static_cast<std::int64_t>((value ^ sign) - sign);
  }

  double floating() {
    const std::uint8_t* bytes = input_.take(8);
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < 8; ++i) value = value << 8 | bytes[i];
    double result = 0;
    std::memcpy(&result, &value, sizeof(result));
    return result;
  }

  void push(Value value) {
    data_.count_value();
    stack_.push_back(value);
  }

  void push_string(std::size_t length) {
    expect(length <= kLongestString, "a string of ", length, " bytes");
    const auto* text = reinterpret_cast<const char*>(input_.take(length));
    push(data_.add_string({text, length}));
  }

  void push_remembered(std::uint64_t index) {
    expect(index < memo_.size(), "memo entry ", index, " of ", memo_.size());
    push(memo_[index]);
  }

  /// The top value above the last mark.
  Value top() {
    expect(stack_.size() > (marks_.empty() ? 0 : marks_.back()), "takes a value that is not there");
    return stack_.back();
  }

  void remember() {
    expect(memo_.size() < data_.most_values(), "more values than a snapshot of this size holds");
    memo_.push_back(top());
  }

  /// Removes the last mark; returns where the values above the mark begin.
  std::size_t pop_mark() {
    expect(!marks_.empty(), "takes a mark that is not there");
    const std::size_t begin = marks_.back();
    marks_.pop_back();
    return begin;
  }

  /// The last `count` values on the stack.
  std::size_t last(std::size_t count) {
    expect(stack_.size() >= (marks_.empty() ? 0 : marks_.back()) + count, "takes a value that is not there");
    return stack_.size() - count;
  }

  /// Makes the values from `begin` on one container.
  void gather(Kind kind, std::size_t begin) {
    check_items(kind, begin);
    const Value made = data_.add_container(kind, stack_.data() + begin, stack_.data() + stack_.size());
    stack_.resize(begin);
    push(made);
  }

  /// Puts the values from `begin` on into the container below them.
  void put(Kind kind, std::size_t begin) {
    const std::size_t least = marks_.empty() ? 0 : marks_.back();
    expect(begin > least, "takes a value that is not there");
    const Value target = stack_[begin - 1];
    expect(target.is(kind), kind == Kind::kList ? "APPENDS to no list" : "SETITEMS of no dict");
    check_items(kind, begin);
    data_.append(target, stack_.data() + begin, stack_.data() + stack_.size());
    stack_.resize(begin);
  }

  void check_items(Kind kind, std::size_t begin) const {
    if (kind != Kind::kDict) return;
    expect((stack_.size() - begin) % 2 == 0, "a key without a value");
    for (std::size_t i = begin; i < stack_.size(); i += 2) {
      expect(stack_[i].is(Kind::kString), "SETITEMS of something else than a dict and its keys of str");
    }
  }

  Input& input_;
  PlainData& data_;
  std::vector<Value> stack_;
  std::vector<std::size_t> marks_;
  std::vector<Value> memo_;
};

/// False at STOP.
bool PickleReader::step(std::uint8_t opcode) {
  switch (opcode) {
    case 'h':  // BINGET
      push_remembered(input_.byte());
      return true;
    case 'j':  // LONG_BINGET
      push_remembered(unsigned_integer(4));
      return true;
    case 0x8A: {  // LONG1
      const std::size_t width = input_.byte();
      expect(width <= 9, "an integer of ", width, " bytes");
      const std::int64_t value = signed_integer(std::min<std::size_t>(width, 8));
      // PyTorch writes the line of a stack frame without one as the unsigned 64 bits of -1, with a ninth byte for the
      // sign.
      expect(width < 9 || input_.byte() == 0, "an integer of more than 64 bits");
      push(data_.add_integer(value));
      return true;
    }
    case 'K':  // BININT1
      push(data_.add_integer(input_.byte()));
      return true;
    case 'M':  // BININT2
      push(data_.add_integer(static_cast<std::int64_t>(unsigned_integer(2))));
      return true;
    case 'J':  // BININT
      push(data_.add_integer(signed_integer(4)));
      return true;
    case 'G':  // BINFLOAT
      push(data_.add_float(floating()));
      return true;
    case 0x94:  // MEMOIZE
      remember();
      return true;
    case 'q':    // BINPUT
    case 'r': {  // LONG_BINPUT
      const std::uint64_t index = unsigned_integer(opcode == 'q' ? 1 : 4);
      expect(index == memo_.size(), "memo entry ", index, " where the next is ", memo_.size());
      remember();
      return true;
    }
    case '(':  // MARK
      data_.count_value();
      marks_.push_back(stack_.size());
      return true;
    case '}':  // EMPTY_DICT
      gather(Kind::kDict, stack_.size());
      return true;
    case ']':  // EMPTY_LIST
      gather(Kind::kList, stack_.size());
      return true;
    case ')':  // EMPTY_TUPLE
      gather(Kind::kTuple, stack_.size());
      return true;
    case 0x85:  // TUPLE1
    case 0x86:  // TUPLE2
    case 0x87:  // TUPLE3
      gather(Kind::kTuple, last(opcode - 0x84));
      return true;
    case 't':  // TUPLE
      gather(Kind::kTuple, pop_mark());
      return true;
    case 'l':  // LIST
      gather(Kind::kList, pop_mark());
      return true;
    case 'd':  // DICT
      gather(Kind::kDict, pop_mark());
      return true;
    case 'u':  // SETITEMS
      put(Kind::kDict, pop_mark());
      return true;
    case 's':  // SETITEM
      put(Kind::kDict, last(2));
      return true;
    case 'e':  // APPENDS
      put(Kind::kList, pop_mark());
      return true;
    case 'a':  // APPEND
      put(Kind::kList, last(1));
      return true;
    case 0x8C:  // SHORT_BINUNICODE
      push_string(input_.byte());
      return true;
    case 'X':  // BINUNICODE
      push_string(unsigned_integer(4));
      return true;
    case 'N':  // NONE
      push(Value(Kind::kNone));
      return true;
    case 0x88:  // NEWTRUE
      push(Value(Kind::kTrue));
      return true;
    case 0x89:  // NEWFALSE
      push(Value(Kind::kFalse));
      return true;
    case 0x95:  // FRAME: the number of bytes to follow, not used here
      input_.take(8);
      return true;
    case '.':  // STOP
      return false;
    default:
      break;
  }
  const char* what = refused(opcode);
  if (what) refuse("opcode ", what, ": no snapshot holds it, and it was not run");
  constexpr const char* kDigits = "0123456789abcdef";
  refuse("no opcode: 0x", kDigits[opcode >> 4], kDigits[opcode & 15]);
}

}  // namespace

void read_pickle(Input& input, PlainData& data) {
  try {
    PickleReader(input, data).read();
  } catch (const std::invalid_argument& error) {
    refuse(error.what(), " (byte ", input.position(), ")");
  }
}

}  // namespace pac::alloc
