// Python classes for memory of other processes: simulated devices share within a process.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <utility>

#include "allocator/types.hpp"

namespace pac::bindings {

/// Another process's block while it is open here.
struct OpenedBlock {
  std::shared_ptr<const alloc::Address> memory;
};

inline std::optional<OpenedBlock> opened(std::shared_ptr<const alloc::Address> memory) {
  if (!memory) return std::nullopt;
  return OpenedBlock{std::move(memory)};
}

void bind_sharing(pybind11::module_& module);

}  // namespace pac::bindings
