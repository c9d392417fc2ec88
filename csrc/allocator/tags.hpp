// Names of tags, for the whole process.
#pragma once

#include <string>

#include "allocator/types.hpp"

namespace pac::alloc {

/// The tag of this name, made at the first call. The empty name is tag 0, memory without a tag.
Tag tag_named(const std::string& name);
/// Throws std::out_of_range for a number that tag_named() never returned.
std::string name_of(Tag tag);
/// The tag's name for a message.
std::string describe(Tag tag);

}  // namespace pac::alloc
