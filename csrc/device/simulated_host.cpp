// The simulated device's contents of memory: pinned host memory, and copies between host and device.
#include <algorithm>
#include <string>

#include "common/check.hpp"
#include "device/simulated_checks.hpp"
#include "device/simulated_device.hpp"

namespace pac::alloc {

namespace {

// The rate of a PCIe 5.0 link with 16 lanes.
constexpr double kCopyBytesPerUs = 55e3;
constexpr Bytes kContentsStep = 512;

}  // namespace

Bytes SimulatedDevice::host_available() {
  const std::lock_guard lock(mutex_);
  return host_limit_ - std::min(host_limit_, pinned_);
}

std::optional<Address> SimulatedDevice::acquire_host(Bytes size) {
  const std::lock_guard lock(mutex_);
  require(size > 0, "acquire_host", "of 0 bytes");
  if (fails("acquire_host") || size > host_limit_ - std::min(host_limit_, pinned_)) return std::nullopt;
  const std::optional<Address> address = host_.take(size);
  if (!address) return std::nullopt;
  pinned_ += size;
  succeeded("acquire_host");
  return address;
}

void SimulatedDevice::release_host(Address address, Bytes size) {
  const std::lock_guard lock(mutex_);
  require(host_.holds(address, size), "release_host", size, " bytes at ", Hex{address}, " were not acquired");
  host_.give_back(address);
  host_contents_.erase(host_contents_.lower_bound(address), host_contents_.lower_bound(address + size));
  pinned_ -= size;
}

void SimulatedDevice::copy(const char* call, const std::vector<Copy>& copies, bool to_host) {
  const std::lock_guard lock(mutex_);
  if (fails("copy")) throw DeviceError(std::string("simulated device: ") + call + ": fails, as it was asked to");
  for (const Copy& each : copies) {
    require(each.size > 0 && host_.covers(each.host, each.size), call, each.size, " bytes of host memory at ",
            Hex{each.host}, " were not acquired");
    for (Bytes done = 0; done < each.size;) {
      const Piece piece = piece_at(call, each.device + done);
      const Bytes size = std::min(piece.size, each.size - done);
      const Address host = each.host + done;
      Contents& device = contents_[piece.handle];
      const auto host_begin = host_contents_.lower_bound(host);
      const auto host_end = host_contents_.lower_bound(host + size);
      const auto device_begin = device.lower_bound(piece.offset);
      const auto device_end = device.lower_bound(piece.offset + size);
      if (to_host) {
        host_contents_.erase(host_begin, host_end);
        for (auto at = device_begin; at != device_end; ++at)
          host_contents_[host + at->first - piece.offset] = at->second;
      } else {
        device.erase(device_begin, device_end);
        for (auto at = host_begin; at != host_end; ++at) device[piece.offset + at->first - host] = at->second;
      }
      done += size;
    }
    memory_us_ += static_cast<double>(each.size) / kCopyBytesPerUs;
  }
  succeeded("copy");
  finish_all();
}

void SimulatedDevice::write(Address address, std::uint64_t value) {
  const std::lock_guard lock(mutex_);
  require(address % kContentsStep == 0, "write", "the address ", Hex{address}, " is not a multiple of 512");
  const Piece piece = piece_at("write", address);
  contents_[piece.handle][piece.offset] = value;
}

std::uint64_t SimulatedDevice::read(Address address) const {
  const std::lock_guard lock(mutex_);
  require(address % kContentsStep == 0, "read", "the address ", Hex{address}, " is not a multiple of 512");
  const Piece piece = piece_at("read", address);
  const auto contents = contents_.find(piece.handle);
  if (contents == contents_.end()) return 0;
  const auto found = contents->second.find(piece.offset);
  return found == contents->second.end() ? 0 : found->second;
}

void SimulatedDevice::limit_host(Bytes bytes) {
  const std::lock_guard lock(mutex_);
  host_limit_ = bytes;
}

Bytes SimulatedDevice::addresses() const {
  const std::lock_guard lock(mutex_);
  return addresses_;
}

Bytes SimulatedDevice::pinned() const {
  const std::lock_guard lock(mutex_);
  return pinned_;
}

}  // namespace pac::alloc
