#include "device/process.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>
#include <random>

namespace pac::alloc {

namespace {

std::uint64_t draw() {
  std::random_device random;
  return (std::uint64_t{random()} << 32) ^ random();
}

}  // namespace

Process this_process() {
  static std::mutex mutex;
  static Process process;
  const std::lock_guard<std::mutex> lock(mutex);
  if (process.pid != getpid()) process = {getpid(), draw()};  // also in a forked child
  return process;
}

Descriptor::~Descriptor() {
  if (number_ >= 0) ::close(number_);
}

bool out_of_descriptors() {
  const Descriptor probe(::open("/", O_PATH | O_CLOEXEC));
  return probe.number() < 0 && (errno == EMFILE || errno == ENFILE);
}

}  // namespace pac::alloc
