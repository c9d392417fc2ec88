#include "device/host_memory.hpp"

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

namespace pac::alloc {

namespace {

constexpr Bytes kUnknown = std::numeric_limits<Bytes>::max();

/// The first number in a file; kUnknown if there is none ("max", or no such file).
Bytes number_in(const std::string& path) {
  std::ifstream file(path);
  Bytes value = 0;
  return file >> value ? value : kUnknown;
}

/// The number after a key at the beginning of a line; 0 if there is none.
Bytes value_of(const std::string& path, const std::string& wanted) {
  std::ifstream file(path);
  std::string key;
  Bytes value = 0;
  for (std::string rest; file >> key >> value; std::getline(file, rest)) {
    if (key == wanted) return value;
  }
  return 0;
}

/// Available in a control group: the page cache counts as used there, and gives way.
Bytes available_in_group(const std::string& folder, const char* limit_file, const char* usage_file) {
  const Bytes limit = number_in(folder + limit_file);
  const Bytes usage = number_in(folder + usage_file);
  if (limit == kUnknown || usage == kUnknown) return kUnknown;
  const std::string stat = folder + "memory.stat";
  const Bytes cache = value_of(stat, "active_file") + value_of(stat, "inactive_file");
  return limit - std::min(limit, usage - std::min(usage, cache));
}

}  // namespace

Bytes available_host_memory() {
  const Bytes kib = value_of("/proc/meminfo", "MemAvailable:");
  // Version 2 of control groups, then version 1.
  return std::min({kib == 0 ? kUnknown : kib * 1024,
                   available_in_group("/sys/fs/cgroup/", "memory.max", "memory.current"),
                   available_in_group("/sys/fs/cgroup/memory/", "memory.limit_in_bytes", "memory.usage_in_bytes")});
}

}  // namespace pac::alloc
