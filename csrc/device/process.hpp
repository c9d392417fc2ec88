// Processes of this machine, and file descriptors.
#pragma once

#include <cstdint>
#include <utility>

namespace pac::alloc {

/// The nonce tells apart processes that had the same number, in time or in containers.
struct Process {
  std::int64_t pid = 0;
  std::uint64_t nonce = 0;  ///< a random number that the process drew
};

Process this_process();

/// An open file descriptor.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor();
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  Descriptor(Descriptor&& other) noexcept : number_(other.number_) { other.number_ = -1; }
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }

  int number() const { return number_; }

 private:
  int number_;  ///< -1: none
};

/// Whether this process can open no more descriptors.
bool out_of_descriptors();

}  // namespace pac::alloc
