// Memory blocks shared between processes: their description as text, and the memory of other processes opened here.
//
// A block under virtual memory lies in one or more handles. The owner exports the handles for as long as a shared block
// on them is in use; torch keeps a sent tensor's block in use until every receiver is done. So an exported handle is
// never wholly free, and no supply moves it or gives it back.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "allocator/types.hpp"
#include "device/device.hpp"

namespace pac::alloc {

/// A handle under a shared block.
struct SharedPiece {
  std::uint64_t id = 0;  ///< no two handles of the owner have the same
  Bytes size = 0;
  std::int32_t descriptor = -1;
};

struct SharedBlock {
  Process owner;
  Address segment = 0;  ///< the range of addresses, in the owner, that the handles are mapped in
  Bytes segment_size = 0;
  Address begin = 0;  ///< of the first handle
  Bytes offset = 0;   ///< of the block in the first handle
  Bytes size = 0;
  std::vector<SharedPiece> pieces;  ///< in the order of their addresses, without gaps
};

/// The block as text, for another process. Any text may stand before.
std::string to_text(const SharedBlock& block);
/// The block at the end of a text; nullopt for a text of other origin than to_text(). Throws std::invalid_argument for
/// a damaged text.
std::optional<SharedBlock> from_text(std::string_view text);

/// The memory of other processes on one device. Each handle is mapped once, in a range of addresses like the owner's,
/// so two blocks of one segment lie as far apart here as there. Any thread may call.
class Importer : public std::enable_shared_from_this<Importer> {
 public:
  explicit Importer(std::shared_ptr<Device> device) : device_(std::move(device)) {}
  Importer(const Importer&) = delete;
  Importer& operator=(const Importer&) = delete;
  /// Open blocks hold the importer: all are closed by now.
  ~Importer() = default;

  /// The address of the block's first handle here. When the last copy goes, the device is synchronised and handles that
  /// no other block uses are unmapped. Throws DeviceError, and has then changed nothing.
  std::shared_ptr<const Address> open(const SharedBlock& block);
  /// Bytes mapped here of other processes' memory.
  Bytes mapped() const;

 private:
  struct Piece {
    std::uint64_t id = 0;
    Handle handle = 0;
    Bytes size = 0;
    std::uint64_t users = 0;
    std::uint64_t closed = 0;  ///< serial of the last close
  };
  /// Part of an owner's segment.
  struct Mirror {
    Address begin = 0;  ///< in the owner
    Bytes size = 0;
    Address address = 0;              ///< here
    std::map<Address, Piece> pieces;  ///< by address in the owner
  };
  using Segment = std::tuple<std::uint64_t, Address, Bytes>;  ///< the owner's nonce; the range
  using Mirrors = std::list<Mirror>;
  struct Opened;

  Mirror& mirror_for(const SharedBlock& block);
  Mirror& add_mirror(const SharedBlock& block);
  void take(Mirror& mirror, const SharedBlock& block);
  void unmap(Mirror& mirror, std::map<Address, Piece>::iterator piece);
  void erase_if_empty(const Segment& segment, const Mirror& mirror);
  void close(const Opened& opened);

  mutable std::mutex mutex_;
  std::shared_ptr<Device> device_;
  std::map<Segment, Mirrors> mirrors_;
  std::set<std::tuple<Segment, Mirror*, Address>> unused_;  ///< mapped pieces without a user
  std::uint64_t serial_ = 0;
};

}  // namespace pac::alloc
