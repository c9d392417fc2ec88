#include "allocator/tags.hpp"

#include <algorithm>
#include <memory>
#include <mutex>
#include <vector>

namespace pac::alloc {

namespace {

std::mutex mutex;

/// With the mutex held. Never destroyed: threads outlive the statics.
std::vector<std::string>& names() {
  static auto& instance = *std::make_unique<std::vector<std::string>>(1).release();
  return instance;
}

}  // namespace

Tag tag_named(const std::string& name) {
  const std::lock_guard lock(mutex);
  const auto found = std::find(names().begin(), names().end(), name);
  if (found != names().end()) return static_cast<Tag>(found - names().begin());
  names().push_back(name);
  return static_cast<Tag>(names().size() - 1);
}

std::string name_of(Tag tag) {
  const std::lock_guard lock(mutex);
  return names().at(tag);
}

std::string describe(Tag tag) { return tag == 0 ? "memory without a tag" : "the tag '" + name_of(tag) + "'"; }

}  // namespace pac::alloc
