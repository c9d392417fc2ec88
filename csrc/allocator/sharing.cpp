#include "allocator/sharing.hpp"

#include <algorithm>
#include <exception>
#include <iterator>
#include <limits>
#include <type_traits>

#include "common/check.hpp"

namespace pac::alloc {

namespace {

// The text: header, pieces, footer; little-endian numbers. The footer is last, so a reader finds it after any prefix.
constexpr std::string_view kMagic = "pyactcomp shares1";
constexpr std::size_t kHeaderBytes = 7 * 8;
constexpr std::size_t kPieceBytes = 8 + 8 + 4;
constexpr std::size_t kFooterBytes = 4 + 8 + kMagic.size();  // number of pieces, checksum, magic
constexpr Bytes kGranule = 2_MiB;                            // no device maps less
constexpr Bytes kMost = Bytes{1} << 56;                      // beyond any device; sums of two do not overflow

template <class Number>
void put(std::string& text, Number number) {
  auto bits = static_cast<std::make_unsigned_t<Number>>(number);
  for (std::size_t i = 0; i < sizeof bits; ++i) text.push_back(static_cast<char>((bits >> (8 * i)) & 0xff));
}

class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  template <class Number>
  void get(Number& number) {
    std::make_unsigned_t<Number> bits = 0;
    for (std::size_t i = 0; i < sizeof bits; ++i) {
      bits |= static_cast<std::make_unsigned_t<Number>>(static_cast<unsigned char>(text_[i])) << (8 * i);
    }
    number = static_cast<Number>(bits);
    text_.remove_prefix(sizeof bits);
  }

 private:
  std::string_view text_;
};

/// FNV-1a, for damage by accident.
std::uint64_t checksum(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char byte : text) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3;
  return hash;
}

#define CHECK_TEXT(condition, ...) \
  PAC_CHECK(condition, "the description of a shared CUDA tensor is damaged: ", __VA_ARGS__)

void validate(const SharedBlock& block) {
  CHECK_TEXT(block.owner.pid > 0 && block.owner.pid <= std::numeric_limits<std::int32_t>::max(), "process ",
             block.owner.pid);
  const auto whole = [&](Bytes bytes) { return bytes > 0 && bytes < kMost && bytes % kGranule == 0; };
  CHECK_TEXT(whole(block.segment) && whole(block.segment_size), "a segment of ", block.segment_size, " bytes at ",
             block.segment);
  CHECK_TEXT(!block.pieces.empty(), "it has no handles");
  CHECK_TEXT(block.begin >= block.segment && block.begin % kGranule == 0, "the first handle is at ", block.begin);
  Bytes mapped = 0;
  std::set<std::uint64_t> ids;
  for (const SharedPiece& piece : block.pieces) {
    CHECK_TEXT(whole(piece.size) && piece.size <= block.segment_size - std::min(mapped, block.segment_size),
               "a handle of ", piece.size, " bytes");
    CHECK_TEXT(piece.descriptor >= 0, "descriptor ", piece.descriptor);
    CHECK_TEXT(piece.id != 0 && ids.insert(piece.id).second, "the handle ", piece.id, " twice");
    mapped += piece.size;
  }
  CHECK_TEXT(block.begin - block.segment <= block.segment_size - mapped, "the handles end after their segment");
  CHECK_TEXT(block.offset < block.pieces.front().size && block.size > 0 && block.size <= mapped - block.offset &&
                 block.offset + block.size > mapped - block.pieces.back().size,
             block.size, " bytes at ", block.offset, " in handles of ", mapped);
}

}  // namespace

std::string to_text(const SharedBlock& block) {
  std::string text;
  text.reserve(kHeaderBytes + block.pieces.size() * kPieceBytes + kFooterBytes);
  put(text, block.owner.pid);
  put(text, block.owner.nonce);
  put(text, block.segment);
  put(text, block.segment_size);
  put(text, block.begin);
  put(text, block.offset);
  put(text, block.size);
  for (const SharedPiece& piece : block.pieces) {
    put(text, piece.id);
    put(text, piece.size);
    put(text, piece.descriptor);
  }
  put(text, static_cast<std::uint32_t>(block.pieces.size()));
  put(text, checksum(text));
  text.append(kMagic);
  return text;
}

std::optional<SharedBlock> from_text(std::string_view text) {
  if (text.size() < kMagic.size() || text.substr(text.size() - kMagic.size()) != kMagic) return std::nullopt;
  CHECK_TEXT(text.size() >= kHeaderBytes + kFooterBytes, text.size(), " bytes are too few");
  std::uint32_t count = 0;
  std::uint64_t sum = 0;
  Reader footer(text.substr(text.size() - kFooterBytes));
  footer.get(count);
  footer.get(sum);
  const std::size_t room = (text.size() - kHeaderBytes - kFooterBytes) / kPieceBytes;
  CHECK_TEXT(count <= room, count, " handles in ", text.size(), " bytes");
  const std::size_t bytes = kHeaderBytes + count * kPieceBytes + sizeof count;
  text = text.substr(text.size() - (bytes + kFooterBytes - sizeof count), bytes);
  CHECK_TEXT(checksum(text) == sum, "its checksum differs");

  SharedBlock block;
  Reader reader(text);
  reader.get(block.owner.pid);
  reader.get(block.owner.nonce);
  reader.get(block.segment);
  reader.get(block.segment_size);
  reader.get(block.begin);
  reader.get(block.offset);
  reader.get(block.size);
  block.pieces.resize(count);
  for (SharedPiece& piece : block.pieces) {
    reader.get(piece.id);
    reader.get(piece.size);
    reader.get(piece.descriptor);
  }
  validate(block);
  return block;
}

/// A block in use here.
struct Importer::Opened {
  std::shared_ptr<Importer> importer;
  Segment segment;
  Mirror* mirror = nullptr;
  std::vector<Address> pieces;  ///< addresses in the owner
  Address address = 0;

  Opened() = default;
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;
  ~Opened() {
    if (!mirror) return;
    try {
      importer->close(*this);
    } catch (const std::exception&) {
      // The device failed or is gone: handles left in `unused_` wait for the next close.
      return;
    }
  }
};

std::shared_ptr<const Address> Importer::open(const SharedBlock& block) {
  const auto opened = std::make_shared<Opened>();
  opened->importer = shared_from_this();
  opened->segment = {block.owner.nonce, block.segment, block.segment_size};
  Address at = block.begin;
  for (const SharedPiece& piece : block.pieces) {
    opened->pieces.push_back(at);
    at += piece.size;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  Mirror& mirror = mirror_for(block);
  take(mirror, block);
  opened->mirror = &mirror;
  opened->address = mirror.address + (block.begin - mirror.begin);
  return {opened, &opened->address};
}

Bytes Importer::mapped() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  Bytes bytes = 0;
  for (const auto& [segment, mirrors] : mirrors_) {
    for (const Mirror& mirror : mirrors) {
      for (const auto& [address, piece] : mirror.pieces) bytes += piece.size;
    }
  }
  return bytes;
}

/// Where the block's handles are mapped already, or may be. The driver checks the size of a handle when the handle is
/// mapped; a description that names a mapped handle with another size is refused here, before anything has changed.
Importer::Mirror& Importer::mirror_for(const SharedBlock& block) {
  const auto found = mirrors_.find({block.owner.nonce, block.segment, block.segment_size});
  if (found == mirrors_.end()) return add_mirror(block);
  for (Mirror& mirror : found->second) {
    Address at = block.begin;
    bool fits = at >= mirror.begin;
    for (const SharedPiece& piece : block.pieces) {
      const Address end = at + piece.size;
      fits = fits && end <= mirror.begin + mirror.size;
      // Another handle here: the owner's moved, and blocks opened earlier may still use the old one.
      auto next = mirror.pieces.lower_bound(at);
      const bool known = next != mirror.pieces.end() && next->first == at && next->second.id == piece.id;
      CHECK_TEXT(!known || next->second.size == piece.size, "the handle ", piece.id, " of ", next->second.size,
                 " bytes is said to have ", piece.size);
      if (next != mirror.pieces.end() && next->first < end) fits = fits && known;
      if (next != mirror.pieces.begin()) {
        --next;
        fits = fits && next->first + next->second.size <= at;
      }
      at = end;
    }
    if (fits) return mirror;
  }
  return add_mirror(block);
}

Importer::Mirror& Importer::add_mirror(const SharedBlock& block) {
  Mirror mirror;
  mirror.begin = block.segment;
  mirror.size = block.segment_size;
  try {
    mirror.address = device_->reserve(mirror.size);
  } catch (const DeviceError&) {
    // Addresses run out if very many segments are open: reserve the block's alone.
    mirror.begin = block.begin;
    mirror.size = 0;
    for (const SharedPiece& piece : block.pieces) mirror.size += piece.size;
    mirror.address = device_->reserve(mirror.size);
  }
  Mirrors& mirrors = mirrors_[{block.owner.nonce, block.segment, block.segment_size}];
  mirrors.push_back(std::move(mirror));
  return mirrors.back();
}

void Importer::take(Mirror& mirror, const SharedBlock& block) {
  const Segment segment{block.owner.nonce, block.segment, block.segment_size};
  std::vector<std::map<Address, Piece>::iterator> taken;
  Address at = block.begin;
  try {
    for (const SharedPiece& shared : block.pieces) {
      const auto [piece, is_new] = mirror.pieces.try_emplace(at);
      if (is_new) {
        try {
          piece->second.handle = device_->import_handle(block.owner, shared.descriptor, shared.size);
        } catch (...) {
          mirror.pieces.erase(piece);
          throw;
        }
        piece->second.id = shared.id;
        piece->second.size = shared.size;
        try {
          device_->map(mirror.address + (at - mirror.begin), shared.size, piece->second.handle);
        } catch (...) {
          device_->destroy(piece->second.handle, shared.size);
          mirror.pieces.erase(piece);
          throw;
        }
      }
      if (piece->second.users++ == 0) unused_.erase({segment, &mirror, at});
      taken.push_back(piece);
      at += shared.size;
    }
  } catch (...) {
    for (const auto piece : taken) {
      if (--piece->second.users > 0) continue;
      if (piece->second.closed == 0) {
        unmap(mirror, piece);  // new: nothing has run on it
      } else {
        unused_.insert({segment, &mirror, piece->first});
      }
    }
    erase_if_empty(segment, mirror);
    throw;
  }
}

void Importer::unmap(Mirror& mirror, std::map<Address, Piece>::iterator piece) {
  device_->unmap(mirror.address + (piece->first - mirror.begin), piece->second.size);
  device_->destroy(piece->second.handle, piece->second.size);
  mirror.pieces.erase(piece);
}

void Importer::erase_if_empty(const Segment& segment, const Mirror& mirror) {
  if (!mirror.pieces.empty()) return;
  device_->unreserve(mirror.address, mirror.size);
  const auto found = mirrors_.find(segment);
  found->second.remove_if([&](const Mirror& each) { return &each == &mirror; });
  if (found->second.empty()) mirrors_.erase(found);
}

void Importer::close(const Opened& opened) {
  std::unique_lock<std::mutex> lock(mutex_);
  for (const Address address : opened.pieces) {
    Piece& piece = opened.mirror->pieces.at(address);
    piece.closed = ++serial_;
    if (--piece.users == 0) unused_.insert({opened.segment, opened.mirror, address});
  }
  if (unused_.empty()) return;
  const std::uint64_t now = serial_;
  lock.unlock();
  device_->synchronize();  // kernels may still use the memory
  lock.lock();
  for (auto next = unused_.begin(); next != unused_.end();) {
    const auto& [segment, mirror, address] = *next;
    const auto piece = mirror->pieces.find(address);
    if (piece->second.closed > now) {  // closed since: the synchronisation does not cover the last use
      ++next;
      continue;
    }
    unmap(*mirror, piece);
    erase_if_empty(Segment(segment), *mirror);
    next = unused_.erase(next);
  }
}

}  // namespace pac::alloc
