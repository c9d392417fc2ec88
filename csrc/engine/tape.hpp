// Stored bytes that leave the device during forward and come back before backward asks for them.
//
// The tape has the memory of the stored tensors of one device, piece by piece, in the order of packing:
//
//   HERE -> LEAVING   once an eighth of a window was packed since: copied to the host, after the work queued so far,
//                     unless it was of the last window that the forward before packed, with which backward begins
//   LEAVING -> AWAY   once a window was packed since: the packing stream waits for the copy, and the memory is freed
//   AWAY -> COMING    while less than a window is on the device: copied back, the last packed first
//   COMING -> BACK    when backward asks: the stream that reads waits for the copy
//
// A piece that is HERE or LEAVING when backward asks is read where it is. The host never waits, and nothing depends on
// how far the device has come: the memory on the device is a function of the program. It comes from, and goes back to,
// the pool of the stream that computes; the wait before it goes back is what keeps a slow link from falling behind.
//
// All functions are called with the GIL, which is the tape's lock. An allocation may call Python, which may free other
// pieces: what is in use across one is held by a shared pointer.
//
// Longer than 400 lines: each step above reads and writes the same few counters, and is read beside the others.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/passes.hpp"
#include "engine/piece.hpp"
#include "engine/streams.hpp"

namespace pac::engine {

/// The pieces of one configuration on one device: Tape(arena, window, share, min_bytes).
class Tape {
 public:
  using State = Piece::State;
  using Pieces = std::vector<std::shared_ptr<Piece>>;

  struct Counts {
    std::uint64_t packed = 0, sent = 0, left = 0, brought = 0, prefetched = 0, late = 0, stayed = 0, held = 0;
    std::uint64_t packed_bytes = 0, sent_bytes = 0, left_bytes = 0, brought_bytes = 0, stayed_bytes = 0, held_bytes = 0;
  };
  /// What lay where after a piece was packed or read.
  struct Sample {
    bool backward;
    std::size_t on_device, on_host, allocated;  ///< the last: all that the device's allocator gave out, 0 if unknown
  };

  PyObject* self = nullptr;
  Ref arena_object;
  HostArena* arena = nullptr;
  std::size_t window = 0;  ///< 0: one layer, as the sizes of the last forward tell
  double share = 1;
  std::size_t min_bytes = 0;
  Counts counts;

  Tape() = default;
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;
  ~Tape() {
    if (arena) passes_.drop_all(link());
  }

  /// Put the memory of a stored tensor on the tape; null if it stays where it is.
  std::shared_ptr<Piece> adopt(const at::Tensor& tensor, std::int64_t current) {
    const std::size_t nbytes = tensor.storage().nbytes();
    if (nbytes < min_bytes || !tensor.storage().data()) return nullptr;
    bury();
    const auto known = known_.find(tensor.storage().unsafeGetStorageImpl());
    if (known != known_.end()) {
      const Piece& piece = *known->second;
      // Parts of one memory may have counters of their own, as those of unsafe_split do. What this tensor's says
      // matters once the memory was copied; memory written to since then is held by the tensor itself.
      const bool unwritten = torch::autograd::impl::version_counter(tensor).current_version() == 0;
      const bool shares = piece.version.current_version() == piece.saved && (piece.state == State::kHere || unwritten);
      return shares ? known->second->shared_from_this() : nullptr;
    }
    const bool forward = !torch::autograd::get_current_node();
    if (backward_ && forward) begin_forward();
    if (forward) passes_.begin_forward(link(), current);
    const std::size_t position = sizes_.size();
    if (position < kMostSamples) sizes_.push_back(nbytes);
    ++counts.packed;
    counts.packed_bytes += nbytes;
    seen_ += static_cast<double>(nbytes);
    if (came_late(position, nbytes) || taken_ + static_cast<double>(nbytes) > share * seen_ + 1) {
      ++counts.stayed;
      counts.stayed_bytes += nbytes;
      return nullptr;
    }
    taken_ += static_cast<double>(nbytes);
    auto piece = std::make_shared<Piece>(Ref::borrowed(self), *this, tensor, current);
    piece->index = ++last_;
    piece->position = position;
    pieces_[piece->index] = piece.get();
    known_[piece->memory.unsafeGetStorageImpl()] = piece.get();
    on_device_ += nbytes;
    unsent_ += nbytes;
    // In the first forward the last window is unknown: most of what is packed waits until it has to leave.
    const std::size_t hold = first_ ? limit() / 4 * 3 : limit() / 8;
    if (unsent_ >= hold + std::min(kBatch, hold)) send(hold, false);
    release();
    release_held(kTries);
    sample(piece->device);
    warn_of_short_host();
    return piece;
  }

  /// Return the memory of a piece, to be read by work queued on the current stream from here on.
  c10::Storage need(Piece& piece) {
    const auto alive = piece.shared_from_this();
    bury();
    const std::int64_t current = stream_at(piece.device);
    const bool in_backward = static_cast<bool>(torch::autograd::get_current_node());
    if (in_backward && !std::exchange(backward_, true)) {
      next_ = 0;
      passes_.begin_backward(link(), current);
      release_held(held_.size());  // what the forward alone held, as transformers' cache holds keys and values
    }
    const bool late = piece.state == State::kAway;
    if (late) {
      ++counts.late;
      if (in_backward) note_late(piece);
      bring({alive}, current);
    }
    if (piece.brought && (piece.state == State::kComing || current != piece.stream)) {
      passes_.wait(link(), current, piece.brought->event());
      piece.state = State::kBack;
    }
    // Held meanwhile, the memory is not among what goes.
    c10::Storage memory = piece.memory;
    if (!in_backward) return memory;
    // Memory that another stream reads may not be freed in the order of this one.
    if (piece.state == State::kBack && current == piece.stream) {
      piece.asked = ++asked_;
      read_.emplace_back(piece.index, piece.asked);
    }
    evict();
    prefetch(piece.index, late, current);
    sample(piece.device);
    return memory;
  }

  /// Return the time of the oldest pass that is over and was not read, see Passes.
  std::optional<Passes::Timing> next_timing(bool finish) { return passes_.next(link(), finish); }
  /// How many timings are unread; a backward is over once this is asked from outside of it.
  std::size_t timings() {
    if (!torch::autograd::get_current_node()) passes_.end_backward(link());
    return passes_.unread();
  }

  Link& link() const { return arena->link(); }
  std::size_t on_device() const { return on_device_; }
  std::size_t alive() const { return pieces_.size(); }
  std::size_t limit() const { return window ? window : planned_; }
  /// The samples of the last forward and its backward.
  const std::vector<Sample>& samples() const { return samples_; }

  /// Free what was under way when it died during a capture.
  void bury() {
    if (dead_.empty() || link().is_capturing(dead_.front().stream)) return;
    for (const Dead& each : dead_) link().wait(each.stream, each.moved->event());
    dead_.clear();
  }

 private:
  friend struct Piece;

  struct Dead {
    c10::Storage memory;
    When moved;
    std::int64_t stream;
  };

  static constexpr std::size_t kBatch = std::size_t{32} << 20;
  static constexpr std::size_t kFirstWindow = std::size_t{1} << 30;
  static constexpr std::size_t kSmallestWindow = std::size_t{64} << 20;
  static constexpr int kLookAhead = 256;
  static constexpr int kMostStrayed = 8;
  static constexpr std::size_t kTries = 16;
  static constexpr std::size_t kMostSamples = std::size_t{1} << 16;

  static std::int64_t stream_at(c10::Device device) { return device.is_cuda() ? current_stream(device.index()) : 0; }

  void refuse_capture(std::int64_t stream) {
    if (link().is_capturing(stream)) rare("refuse_capture", {});
  }

  void warn_of_short_host() {
    if (!arena->is_short() || warned_) return;
    warned_ = true;
    const Ref pinned(PyLong_FromSize_t(arena->pinned())), available(PyLong_FromSize_t(link().available()));
    rare("warn_of_short_host", {pinned.get(), available.get()});
  }

  void sample(c10::Device device) {
    if (samples_.size() < kMostSamples) samples_.push_back({backward_, on_device_, arena->taken(), allocated(device)});
  }

  std::size_t allocated(c10::Device device) {
    if (!device.is_cuda() || !has_counters_) return 0;
    try {
      auto* const allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
      if (allocator)
        return static_cast<std::size_t>(allocator->getDeviceStats(device.index()).allocated_bytes[0].current);
    } catch (const c10::Error&) {  // a pluggable allocator counts nothing
    }
    has_counters_ = false;
    return 0;
  }

  /// Let a piece stay for as long as it lives.
  void stay(Piece& piece) {
    if (piece.counts()) on_device_ -= piece.nbytes;
    piece.state = State::kStays;
  }

  /// Send the oldest pieces, until at most `left` bytes are unsent; of the last window only if asked to.
  void send(std::size_t left, bool last_window) {
    std::vector<Piece*> leaving;
    for (auto next = pieces_.lower_bound(unsent_from_); next != pieces_.end() && unsent_ > left; ++next) {
      Piece& piece = *next->second;
      if (!last_window && is_in_last_window(piece)) break;
      unsent_from_ = next->first + 1;
      unsent_ -= piece.nbytes;
      // Who resized the memory, as FSDP does with its own, will use it again.
      auto block = piece.memory.nbytes() == piece.nbytes ? arena->take(piece.nbytes) : std::nullopt;
      if (!block) {
        ++counts.stayed;
        counts.stayed_bytes += piece.nbytes;
        stay(piece);
        continue;
      }
      piece.block = std::move(*block);
      leaving.push_back(&piece);
    }
    // Pieces packed on one stream go together.
    for (auto begin = leaving.begin(); begin != leaving.end();) {
      const std::int64_t stream = (*begin)->packed_on;
      const auto end = std::find_if(begin, leaving.end(), [&](const Piece* p) { return p->packed_on != stream; });
      copy_out({begin, end}, stream, {begin, leaving.end()});
      begin = end;
    }
  }

  /// Add a copy for each part of a piece's block, to or from the piece's memory on the device.
  template <class After>
  static void add_copies(std::vector<Link::Copy>& copies, const Piece& piece, char* memory, const After& after) {
    std::size_t left = piece.nbytes;  // a block is rounded up
    for (const HostArena::Part& part : piece.block) {
      const std::size_t size = std::min(part.size, left);
      copies.push_back({memory, part.address, size, after(part)});
      memory += size;
      left -= size;
    }
  }

  void copy_out(const std::vector<Piece*>& pieces, std::int64_t stream, const std::vector<Piece*>& rest) {
    std::vector<Link::Copy> copies;
    for (const Piece* each : pieces) {
      char* const memory = static_cast<char*>(const_cast<void*>(each->memory.data()));
      add_copies(copies, *each, memory,
                 [](const HostArena::Part& part) { return part.after ? part.after->event() : Link::Event{0}; });
    }
    Link::Event done = 0;
    try {
      refuse_capture(stream);
      check_copy(link(), link().send(stream, copies.data(), copies.size(), &done));
    } catch (...) {
      for (Piece* each : rest) {
        arena->give(std::exchange(each->block, {}), nullptr);
        stay(*each);
      }
      throw;
    }
    const When sent = std::make_shared<const Moment>(link(), done);
    for (Piece* each : pieces) {
      each->state = State::kLeaving;
      each->sent = sent;
      ++counts.sent;
      counts.sent_bytes += each->nbytes;
    }
  }

  /// Free the memory of the oldest pieces, until no more than a window is on the device.
  void release() {
    const Moment* waited = nullptr;
    while (on_device_ > limit()) {
      const auto next = pieces_.lower_bound(kept_from_);
      // The last one is still in the hands of who packs it.
      if (next == pieces_.end() || next->first == last_) return;
      Piece& piece = *next->second;
      if (piece.state == State::kHere) send(0, true);
      kept_from_ = piece.index + 1;
      if (piece.state != State::kLeaving) continue;
      if (piece.sent.get() != waited) {
        refuse_capture(piece.stream);
        passes_.wait(link(), piece.stream, piece.sent->event());
      }
      waited = piece.sent.get();
      if (drop(piece)) continue;
      // Somebody else holds the memory, perhaps for a while only, as a residual or a skip connection.
      stay(piece);
      held_.push_back(piece.index);
      ++counts.held;
      counts.held_bytes += piece.nbytes;
    }
  }

  /// Free what somebody else held, once nobody does: look at so many pieces.
  void release_held(std::size_t most) {
    for (std::size_t tries = std::min(held_.size(), most); tries > 0; --tries) {
      const std::uint64_t index = held_.front();
      held_.pop_front();
      const auto known = pieces_.find(index);
      if (known != pieces_.end() && !drop(*known->second)) held_.push_back(index);
    }
  }

  /// Let go of a piece's memory on the device; false, and nothing changed, if somebody else holds it.
  bool drop(Piece& piece) {
    auto weak = piece.memory.getWeakStorageImpl();
    const c10::StorageImpl* const address = piece.memory.unsafeGetStorageImpl();
    piece.memory = c10::Storage();
    if (auto held = weak.lock()) {
      piece.memory = c10::Storage(std::move(held));
      return false;
    }
    known_.erase(address);
    if (piece.counts()) on_device_ -= piece.nbytes;
    if (!piece.brought) {
      ++counts.left;
      counts.left_bytes += piece.nbytes;
    }
    piece.state = State::kAway;
    return true;
  }

  /// Copy pieces back to memory of the current stream's pool.
  void bring(const Pieces& pieces, std::int64_t current) {
    refuse_capture(current);
    std::vector<c10::Storage> memories;
    std::vector<Link::Copy> copies;
    for (const auto& each : pieces) {
      const at::Tensor fresh =
          observer::empty_with_gil({static_cast<std::int64_t>(each->nbytes)}, {1}, at::kByte, each->device);
      memories.push_back(fresh.storage());
      // The stream that packed has waited for the copy to the host; another one may not have.
      const Link::Event after = each->packed_on == current ? 0 : each->sent->event();
      char* const memory = static_cast<char*>(memories.back().mutable_data());
      add_copies(copies, *each, memory, [after](const HostArena::Part&) { return after; });
    }
    std::vector<Link::Event> done(copies.size(), 0);
    check_copy(link(), link().bring(current, copies.data(), copies.size(), done.data()));
    auto event = done.begin();
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      Piece& piece = *pieces[i];
      // Copies run in order: the last part's is the piece's.
      for (std::size_t part = 1; part < piece.block.size(); ++part) link().recycle(*event++);
      piece.brought = std::make_shared<const Moment>(link(), *event++);
      piece.memory = std::move(memories[i]);
      piece.stream = current;
      piece.state = State::kComing;
      known_[piece.memory.unsafeGetStorageImpl()] = &piece;
      on_device_ += piece.nbytes;
      ++counts.brought;
      counts.brought_bytes += piece.nbytes;
    }
  }

  /// Let a small piece that came late stay from the next step on: tables of positions, say, which backward reads long
  /// before their turn. The stream would wait for the copies that were sent for before.
  void note_late(const Piece& piece) {
    if (late_bytes_ + piece.nbytes > limit() / 16 || !late_.emplace(piece.position, piece.nbytes).second) return;
    late_bytes_ += piece.nbytes;
  }

  /// Return whether the tensor packed at this position came late in an earlier step; of other sizes none did.
  bool came_late(std::size_t position, std::size_t nbytes) {
    const auto found = late_.find(position);
    if (found == late_.end()) return false;
    if (found->second == nbytes) return true;
    late_.clear();
    late_bytes_ = 0;
    return false;
  }

  /// Bring what was packed before, the last first, as long as the window has room.
  ///
  /// Backward reads roughly, not quite, in the reverse order of packing: a node reads what it saved in the order of its
  /// formula, and tables of positions were packed before the first layer. So go on where the last call stopped, though
  /// a piece far down was asked for, until that happens so often that another graph is read.
  void prefetch(std::uint64_t asked, bool was_late, std::int64_t current) {
    strayed_ = was_late && asked < next_ ? strayed_ + 1 : 0;
    if (strayed_ > kMostStrayed) next_ = strayed_ = 0;
    next_ = std::max(next_, asked);
    Pieces wanted;
    const std::size_t mine = on_device_ - kept_above(asked);
    std::size_t room = limit() - std::min(limit(), mine);
    int looked = 0;
    for (auto next = pieces_.upper_bound(next_); next != pieces_.begin() && looked < kLookAhead; ++looked) {
      Piece& piece = *(--next)->second;
      next_ = piece.index;
      if (piece.state != State::kAway) continue;
      // Memory for a reader on another stream must be of that stream's pool.
      if (piece.packed_on != current) continue;
      if (piece.nbytes > room) break;
      room -= piece.nbytes;
      wanted.push_back(piece.shared_from_this());
    }
    if (wanted.empty()) return;
    counts.prefetched += wanted.size();
    bring(wanted, current);
  }

  /// Return the bytes that a forward keeps on the device, if the piece asked for was packed before: those of a newer
  /// graph, as of another part of the batch in a pipeline, which are no reason to bring nothing of this one.
  std::size_t kept_above(std::uint64_t asked) const {
    std::size_t bytes = 0;
    if (asked >= kept_from_) return bytes;
    for (auto next = pieces_.lower_bound(kept_from_); next != pieces_.end(); ++next) {
      const Piece& piece = *next->second;
      if (piece.state == State::kHere || piece.state == State::kLeaving) bytes += piece.nbytes;
    }
    return bytes;
  }

  /// Where a graph is retained: give back what backward has read, a while later. The copies on the host stay valid.
  void evict() {
    for (std::size_t i = read_.size(); i > 0 && on_device_ > 2 * limit(); --i) {
      const auto [index, asked] = read_.front();
      read_.pop_front();
      const auto known = pieces_.find(index);
      if (known == pieces_.end() || known->second->asked != asked || known->second->state != State::kBack) continue;
      if (!drop(*known->second)) read_.emplace_back(index, asked);
    }
    while (!read_.empty() && pieces_.count(read_.front().first) == 0) read_.pop_front();
  }

  /// Note what the forward that is over packed in its last window: there the next one packs what it need not send.
  void note_last_window() {
    if (sizes_.empty()) return;
    first_ = false;
    std::size_t bytes = 0;
    last_from_ = sizes_.size();
    while (last_from_ > 0 && bytes + sizes_[last_from_ - 1] <= limit()) bytes += sizes_[--last_from_];
    last_sizes_.assign(sizes_.begin() + static_cast<std::ptrdiff_t>(last_from_), sizes_.end());
  }

  /// Return whether the last forward packed as many bytes at the piece's position, in its last window. What is packed
  /// past its end is of another graph.
  bool is_in_last_window(const Piece& piece) const {
    const std::size_t end = last_from_ + last_sizes_.size();
    return piece.position >= last_from_ && piece.position < end && sizes_.size() <= end &&
           last_sizes_[piece.position - last_from_] == piece.nbytes;
  }

  void begin_forward() {
    backward_ = false;
    read_.clear();
    send(limit() / 8, true);  // the last windows of graphs that wait for their backward, as in a pipeline
    if (sizes_.size() > 1) planned_ = std::max(bytes_of_layer(sizes_), kSmallestWindow);
    note_last_window();
    sizes_.clear();
    samples_.clear();
    passes_.finish_step(link());
    if (pieces_.empty()) seen_ = taken_ = 0;
  }

  void forget(Piece& piece) {
    if (piece.counts()) on_device_ -= piece.nbytes;
    if (piece.index >= unsent_from_) unsent_ -= piece.nbytes;
    pieces_.erase(piece.index);
    if (piece.memory) {
      const auto known = known_.find(piece.memory.unsafeGetStorageImpl());
      if (known != known_.end() && known->second == &piece) known_.erase(known);
    }
    if (const Moment* const moved = piece.under_way()) {
      // The memory goes back to the stream's pool, after the copy.
      if (link().is_capturing(piece.stream)) {
        dead_.push_back({piece.memory, piece.state == State::kLeaving ? piece.sent : piece.brought, piece.stream});
      } else {
        link().wait(piece.stream, moved->event());
      }
    }
    if (!piece.block.empty()) arena->give(piece.block, piece.brought);
  }

  std::map<std::uint64_t, Piece*> pieces_;
  std::unordered_map<const c10::StorageImpl*, Piece*> known_;  ///< by the memory on the device
  std::deque<std::pair<std::uint64_t, std::uint64_t>> read_;   ///< pieces brought and read, in the order of reading
  std::deque<std::uint64_t> held_;                             ///< pieces on the host whose memory others hold
  std::vector<Dead> dead_;
  Passes passes_;
  std::vector<std::size_t> sizes_;                     ///< of all that this forward packed
  std::vector<std::size_t> last_sizes_;                ///< of what the last forward packed in its last window
  std::size_t last_from_ = 0;                          ///< the position of the first of them
  std::unordered_map<std::size_t, std::size_t> late_;  ///< sizes of what stays since it came late, by position
  std::vector<Sample> samples_;
  std::uint64_t last_ = 0, unsent_from_ = 1, kept_from_ = 1, asked_ = 0;
  std::size_t on_device_ = 0, unsent_ = 0, late_bytes_ = 0, planned_ = kFirstWindow;
  double seen_ = 0, taken_ = 0;
  std::uint64_t next_ = 0;  ///< where the next look for what to bring begins
  int strayed_ = 0;         ///< pieces in a row that were late and below that
  bool backward_ = false, first_ = true, warned_ = false, has_counters_ = true;
};

inline Piece::~Piece() { tape.forget(*this); }

inline at::Tensor Placed::tensor() const {
  auto made = c10::make_intrusive<c10::TensorImpl>(piece->tape.need(*piece), keys, dtype);
  made->set_storage_offset(offset);
  made->set_sizes_and_strides(sizes, strides);
  made->set_version_counter(version);
  return at::Tensor(std::move(made));
}

}  // namespace pac::engine
