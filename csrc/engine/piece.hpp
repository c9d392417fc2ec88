// The memory of one stored tensor on a tape, and a tensor in it.
#pragma once

#include <c10/core/Storage.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "engine/host_arena.hpp"
#include "engine/python.hpp"

namespace pac::engine {

class Tape;

/// The memory of one stored tensor, or of several that share it.
struct Piece : std::enable_shared_from_this<Piece> {
  enum class State {
    kStays,    ///< for good, or as long as somebody else holds the memory
    kHere,     ///< not sent yet
    kLeaving,  ///< a copy to the host was queued
    kAway,     ///< on the host alone
    kComing,   ///< a copy back was queued
    kBack,     ///< on the device again; the host's copy stays valid
  };

  Ref owner;  ///< the Python object of the tape
  Tape& tape;
  State state = State::kHere;
  c10::Storage memory;  ///< on the device; none while away
  c10::Device device;
  std::size_t nbytes;
  std::uint64_t index = 0;   ///< on the tape
  std::size_t position = 0;  ///< among what its forward packed
  std::int64_t packed_on;    ///< the stream that packed it
  std::int64_t stream;       ///< the stream whose pool the memory is of
  c10::VariableVersion version;
  std::uint32_t saved;
  HostArena::Block block;
  When sent;     ///< the copy to the host
  When brought;  ///< the last copy back
  std::uint64_t asked = 0;

  Piece(const Ref& tape_object, Tape& on, const at::Tensor& tensor, std::int64_t current)
      : owner(tape_object),
        tape(on),
        memory(tensor.storage()),
        device(tensor.device()),
        nbytes(tensor.storage().nbytes()),
        packed_on(current),
        stream(current),
        version(torch::autograd::impl::version_counter(tensor)),
        saved(version.current_version()) {}
  Piece(const Piece&) = delete;
  Piece& operator=(const Piece&) = delete;
  ~Piece();

  bool counts() const { return state != State::kStays && state != State::kAway; }
  /// The copy that must be over before the memory may be used for something else, or null.
  const Moment* under_way() const {
    return state == State::kLeaving ? sent.get() : state == State::kComing ? brought.get() : nullptr;
  }
};

/// A tensor in a piece's memory.
struct Placed {
  std::shared_ptr<Piece> piece;
  c10::DispatchKeySet keys;
  caffe2::TypeMeta dtype;
  c10::SmallVector<std::int64_t, 5> sizes, strides;
  std::int64_t offset;
  c10::VariableVersion version;
  std::size_t nbytes;

  Placed(std::shared_ptr<Piece> in, const at::Tensor& tensor)
      : piece(std::move(in)),
        keys(tensor.key_set()),
        dtype(tensor.dtype()),
        sizes(tensor.sizes().begin(), tensor.sizes().end()),
        strides(tensor.strides().begin(), tensor.strides().end()),
        offset(tensor.storage_offset()),
        version(torch::autograd::impl::version_counter(tensor)),
        nbytes(tensor.nbytes()) {}

  /// Return the tensor, to be read by work queued on the current stream from here on.
  at::Tensor tensor() const;
};

}  // namespace pac::engine
