// The link between a device and pinned host memory: copies on two streams of its own, ordered by events.
//
// The engine, in a library that includes torch, calls it through a capsule, so the interface has plain functions alone:
// no exception passes, and nothing of the standard library. A call returns 0, or a status that describe() explains.
// No call waits for the device, but pin() and unpin() may.
//
//   Link* link = static_cast<Link*>(PyCapsule_GetPointer(capsule, kLinkCapsule));
//   std::uint64_t sent = 0;
//   link->send(stream, copies, count, &sent);  // after the work queued on `stream`
//   link->wait(stream, sent);                  // work queued on `stream` from here on runs after the copies
//   link->recycle(sent);
#pragma once

#include <cstddef>
#include <cstdint>

namespace pac {

/// Raised by every change of the interface: it is part of the capsule's name.
inline constexpr const char* kLinkCapsule = "pyactcomp._core.link.3";

class Link {
 public:
  using Status = std::int32_t;
  using Event = std::uint64_t;  ///< 0 stands for work that is done
  using Stream = std::int64_t;  ///< a cudaStream_t

  /// One copy; the host's memory is written, or read, only after `after`.
  struct Copy {
    void* device;
    void* host;
    std::size_t size;
    Event after;
  };

  Link() = default;
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  /// Copies to the host, after the work queued on `stream`; `done` is the event of all copies.
  virtual Status send(Stream stream, const Copy* copies, std::size_t count, Event* done) noexcept = 0;
  /// Copies to the device, after the work queued on `stream`; `done` has an event for each copy.
  virtual Status bring(Stream stream, const Copy* copies, std::size_t count, Event* done) noexcept = 0;
  /// Lets the work queued on `stream` from here on run after an event.
  virtual Status wait(Stream stream, Event event) noexcept = 0;
  /// Takes back an event that nobody will wait for.
  virtual void recycle(Event event) noexcept = 0;
  /// Puts an event with a time after the work queued on `stream`.
  virtual Status mark(Stream stream, Event* made) noexcept = 0;
  /// Waits, on the host, for an event with a time.
  virtual Status finish(Event event) noexcept = 0;
  /// The seconds between two events with a time; negative where one has not happened, and for any failure.
  virtual double elapsed(Event begin, Event end) noexcept = 0;
  /// Takes back an event with a time.
  virtual void recycle_mark(Event event) noexcept = 0;
  /// Whether `stream` is being captured into a graph.
  virtual bool is_capturing(Stream stream) noexcept = 0;

  /// Pins host memory; null without enough of it.
  virtual void* pin(std::size_t size) noexcept = 0;
  virtual void unpin(void* memory, std::size_t size) noexcept = 0;
  /// The bytes of host memory that could be pinned now without driving the process out of memory.
  virtual std::size_t available() noexcept = 0;

  /// Writes the text of a failed status, at most `capacity` bytes with the zero that ends it.
  virtual void describe(Status status, char* text, std::size_t capacity) noexcept = 0;

 protected:
  ~Link() = default;
};

}  // namespace pac
