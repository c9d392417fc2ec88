#include "bindings/kernels.hpp"

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "codec/kernel_table.hpp"
#include "common/check.hpp"

namespace py = pybind11;

namespace pac::bindings {
namespace {

using Address = std::uintptr_t;

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);  // NOLINT(performance-no-int-to-ptr)
}

/// In the order of the enumerations.
constexpr std::array<std::string_view, 10> kEncodings = {"codes",    "booleans", "comparison",  "cast",
                                                         "bfloat16", "float16",  "probability", "log_probability",
                                                         "artanh",   "scaled"};
constexpr std::array<std::string_view, 6> kRelations = {"above",   "below",  "not below",
                                                        "between", "within", "not outside"};
constexpr std::array<std::string_view, 5> kDTypes = {"float32", "bfloat16", "float16", "bool", "float64"};
constexpr std::array<std::string_view, 3> kTargets = {"cpu", "cpu_baseline", "cuda"};

/// Returns the member of an enumeration by its name.
template <class Enumeration, std::size_t kCount>
Enumeration named(const char* what, const std::array<std::string_view, kCount>& names, std::string_view name) {
  std::string listed;
  for (std::size_t i = 0; i < kCount; ++i) {
    if (names[i] == name) return static_cast<Enumeration>(i);
    listed += std::string(i ? ", " : "") + std::string(names[i]);
  }
  PAC_CHECK(false, what, " is one of ", listed, ", got ", name);
}

Comparison comparison_of(std::string_view relation, double low, double high, double yes, double no) {
  return {named<Relation>("relation", kRelations, relation), low, high, yes, no};
}

/// One format on one device.
class BoundKernel {
 public:
  BoundKernel(std::string_view encoding, std::string_view dtype, std::string_view target, int device, int bits,
              int group_size, bool stochastic, bool keep_positive, std::string_view narrow,
              const Comparison& comparison)
      : bound_{nullptr, {}, named<Target>("target", kTargets, target), device} {
    bound_.format.encoding = named<Encoding>("encoding", kEncodings, encoding);
    bound_.format.dtype = named<DType>("dtype", kDTypes, dtype);
    bound_.format.bits = bits;
    bound_.format.group_size = group_size;
    bound_.format.stochastic = stochastic;
    bound_.format.keep_positive = keep_positive;
    bound_.format.narrow = named<DType>("narrow", kDTypes, narrow);
    bound_.format.comparison = comparison;
    PAC_CHECK(bits == 8 || bits == 4 || bits == 2, "bits is 8, 4 or 2, got ", bits);
    PAC_CHECK(group_size == 64 || group_size == 128 || group_size == 256, "group_size is 64, 128 or 256, got ",
              group_size);
    PAC_CHECK(bound_.target != Target::kCuda || device >= 0, "device is the index of a CUDA device, got ", device);
    bound_.kernel = kernel_table().find(bound_.format, bound_.target);
    PAC_CHECK(bound_.kernel != nullptr, "no kernel for ", target, " stores ", dtype, " as ", encoding,
              bound_.format.encoding == Encoding::kCast ? " to " + std::string(narrow) : std::string());
  }

  /// Valid as long as this object.
  const Bound& bound() const { return bound_; }

  std::int64_t packed_nbytes(std::int64_t numel) const { return bound_.kernel->packed_nbytes(bound_.format, numel); }

  /// Operators of torch take a seed of 64 bits as a signed integer.
  void encode(Address source, Address packed, std::int64_t numel, const py::int_& seed, std::int64_t where) const {
    const Keys keys =
        bound_.format.stochastic ? kernel_table().random_keys(PyLong_AsUnsignedLongLongMask(seed.ptr())) : Keys{};
    run(where, [&](const Place& place) {
      return bound_.kernel->encode(bound_.format, pointer<const void>(source), pointer<void>(packed), numel, keys,
                                   place);
    });
  }

  void encode_rows(Address source, std::int64_t length, std::int64_t gap, Address packed, std::int64_t numel,
                   std::int64_t where) const {
    PAC_CHECK(bound_.kernel->encode_rows != nullptr, "the kernel reads dense tensors alone");
    run(where, [&](const Place& place) {
      return bound_.kernel->encode_rows(bound_.format, pointer<const void>(source), {length, gap},
                                        pointer<void>(packed), numel, place);
    });
  }

  void decode(Address packed, Address out, std::int64_t numel, std::int64_t where) const {
    run(where, [&](const Place& place) {
      return bound_.kernel->decode(bound_.format, pointer<const void>(packed), pointer<void>(out), numel, place);
    });
  }

 private:
  /// A launch is too short to give the GIL away; packing on the host is not.
  template <class Work>
  void run(std::int64_t where, const Work& work) const {
    Status status = 0;
    if (bound_.target == Target::kCuda) {
      status = work(Place{bound_.device, pointer<void>(static_cast<Address>(where)), 0});
    } else {
      const py::gil_scoped_release released;
      status = work(Place{bound_.device, nullptr, static_cast<std::int32_t>(where)});
    }
    if (status == 0) return;
    std::array<char, 256> text{};
    kernel_table().describe(status, text.data(), text.size());
    throw DeviceError(std::string("a kernel of the codec failed: ") + text.data());
  }

  Bound bound_;
};

}  // namespace

void bind_kernels(py::module_& module) {
  py::class_<Comparison>(module, "Comparison")
      .def(py::init(&comparison_of), py::arg("relation"), py::arg("low"), py::arg("high"), py::arg("yes"),
           py::arg("no"));
  py::class_<BoundKernel>(module, "Kernel", "One stored form of one dtype on one device.")
      .def(py::init<std::string_view, std::string_view, std::string_view, int, int, int, bool, bool, std::string_view,
                    const Comparison&>(),
           py::arg("encoding"), py::arg("dtype"), py::arg("target"), py::arg("device") = -1, py::kw_only(),
           py::arg("bits") = 8, py::arg("group_size") = 64, py::arg("stochastic") = false,
           py::arg("keep_positive") = false, py::arg("narrow") = "float32", py::arg("comparison") = Comparison{})
      .def_property_readonly("bound",
                             [](const BoundKernel& kernel) { return py::capsule(&kernel.bound(), kBoundCapsule); })
      .def("packed_nbytes", &BoundKernel::packed_nbytes, py::arg("numel"))
      .def("encode", &BoundKernel::encode, py::arg("source"), py::arg("packed"), py::arg("numel"), py::arg("seed"),
           py::arg("where"))
      .def("encode_rows", &BoundKernel::encode_rows, py::arg("source"), py::arg("length"), py::arg("gap"),
           py::arg("packed"), py::arg("numel"), py::arg("where"))
      .def("decode", &BoundKernel::decode, py::arg("packed"), py::arg("out"), py::arg("numel"), py::arg("where"));
#if PAC_CUDA_CODEC
  module.attr("has_cuda_codec") = true;
#else
  module.attr("has_cuda_codec") = false;
#endif
  // PyCapsule_Import reads the pointer; nothing writes through it.
  module.attr("kernels") = py::capsule(&kernel_table(), kKernelCapsule);
}

}  // namespace pac::bindings
