// The module pyactcomp._phantom: tensors on a CUDA device that is not there. Each has the address of memory that does
// not exist, and the list of what was taken and given back is what a GPU's allocator would have been asked.
//
// The module is compiled for one release of torch, as _observer is, and loaded in a process of its own, before torch.
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "phantom/device.hpp"
#include "phantom/link.hpp"
#include "phantom/memory.hpp"
#include "phantom/operators.hpp"

namespace pac::phantom {
namespace {

namespace py = pybind11;
using Names = std::vector<std::pair<std::string, std::string>>;

template <class T>
py::bytes bytes(const std::vector<T>& column) {
  return {reinterpret_cast<const char*>(column.data()), column.size() * sizeof(T)};
}

py::tuple columns() {
  const Columns all = ledger().columns();
  return py::make_tuple(bytes(all.action), bytes(all.address), bytes(all.size), bytes(all.label));
}

}  // namespace

// NOLINTNEXTLINE(readability-identifier-naming): the macro's
PYBIND11_MODULE(_phantom, m) {
  m.doc() = "Tensors on a CUDA device that is not there; compiled for the release of torch in BUILT_FOR.";
  m.attr("BUILT_FOR") = PAC_BUILT_FOR;
  m.def("register_device", &register_device, "Put the device in place of CUDA's; before torch is imported.");
  m.def(
      "register_operators",
      [](const Names& writing, const Names& products, const Names& biased, const Names& others) {
        register_attention();
        serve(writing, Kind::kWriting);
        serve(products, Kind::kProduct);
        serve(biased, Kind::kBiasedProduct);
        serve(others, Kind::kHandingOn);
        serve_memory();
      },
      "Serve CUDA's operators: those that write into arguments, then matrix products without and with a bias, and "
      "others.");
  m.def(
      "set_device",
      [](int major, int minor, std::int64_t workspace, std::int64_t biased) {
        capability() = {major, minor};
        workspace_bytes()[0] = workspace;
        workspace_bytes()[1] = biased;
      },
      "Set the version of the instructions, and the bytes of the workspaces of cuBLAS and cuBLASLt for each thread.");
  m.def("take_workspace", &take_workspace,
        "Take the workspaces of this thread, each once: cuBLAS's, and for a product with a bias cuBLASLt's.");
  m.def("fresh", &fresh, "Return a tensor with memory of its own: nbytes, dtype, sizes, strides, offset.");
  m.def(
      "alias",
      [](const at::Tensor& base, at::ScalarType dtype, const std::vector<std::int64_t>& sizes,
         const std::vector<std::int64_t>& strides,
         std::int64_t offset) { return over(base.storage(), dtype, sizes, strides, offset); },
      "Return a tensor over the memory of another.");
  m.def(
      "temporary",
      [](const std::vector<std::int64_t>& sizes) {
        std::vector<std::unique_ptr<Block>> blocks;
        for (const auto size : sizes) {
          if (size > 0) blocks.push_back(std::make_unique<Block>(size));
        }
      },
      "Take blocks of these sizes together, and give them back.");
  m.def(
      "set_label", [](std::int32_t label) { return std::exchange(Ledger::label(), label); },
      "Set the label of what this thread takes from now on; return the last.");
  m.def("live", [] { return ledger().live(); }, "Return the bytes in use.");
  m.def(
      "peak", [](bool reset) { return ledger().peak(reset); }, py::arg("reset") = false,
      "Return the most bytes in use since the last reset.");
  m.def("count", [] { return ledger().count(); }, "Return the number of events.");
  m.def("reads", [] { return reads().load(); }, "Return how many values the program has read on the host.");
  m.def("answers", [] { return answers().given.load(); }, "Return how many booleans the program has read on the host.");
  m.def("waiting", [] { return answers().waiting.load(); }, "Return whether a loop seemed to wait for another answer.");
  m.def(
      "deny", [](const std::set<std::int64_t>& denied) { answers().denied = denied; },
      "Set the numbers of booleans that are false when they are read; all others are true.");
  py::class_<NoLink>(m, "Link", "The way to a host that is not there: nothing is copied, pinned memory is an address.")
      .def(py::init<>())
      .def_property_readonly("link", [](NoLink& self) {
        return py::capsule(static_cast<Link*>(&self), kLinkCapsule);  // the Python object must outlive the use
      });
  m.def("columns", &columns, "Return the events: actions, addresses, sizes and labels, as bytes.");
}

}  // namespace pac::phantom
