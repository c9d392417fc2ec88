// The Python module pyactcomp._core: codecs bound to a format, taking addresses; and the allocator.
#include <pybind11/pybind11.h>

#include <cstdint>

#include "bindings/allocator.hpp"
#include "bindings/recording.hpp"
#include "bindings/replay.hpp"
#include "codec/cpu.hpp"
#include "common/check.hpp"

#if PAC_CUDA_CODEC
#include "codec/cuda.hpp"
#endif

namespace py = pybind11;

namespace {

using Address = std::uintptr_t;

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);  // NOLINT(performance-no-int-to-ptr)
}

pac::Spec checked_spec(int dtype, int bits, int group_size, bool stochastic, bool keep_positive) {
  PAC_CHECK(dtype >= 0 && dtype <= 3, "dtype is one of FLOAT32, BFLOAT16, FLOAT16, BOOL (0 to 3), got ", dtype);
  const bool boolean = dtype == static_cast<int>(pac::DType::kBool);
  PAC_CHECK(boolean ? bits == 1 : bits == 8 || bits == 4 || bits == 2,
            boolean ? "bits is 1 for booleans, got " : "bits is 8, 4 or 2, got ", bits);
  PAC_CHECK(boolean || group_size == 64 || group_size == 128 || group_size == 256, "group_size is 64, 128 or 256, got ",
            group_size);
  return {static_cast<pac::DType>(dtype), bits, group_size, stochastic, keep_positive};
}

class CpuCodec {
 public:
  CpuCodec(int dtype, int bits, int group_size, bool stochastic, bool keep_positive, bool simd)
      : spec_(checked_spec(dtype, bits, group_size, stochastic, keep_positive)),
        isa_(simd ? pac::cpu::best_isa() : pac::cpu::Isa::kBaseline) {}

  void encode(Address source, Address out, std::int64_t numel, std::uint32_t key0, std::uint32_t key1,
              int threads) const {
    pac::cpu::encode(spec_, isa_, pointer<const void>(source), pointer<void>(out), numel, {key0, key1}, threads);
  }

  void decode(Address packed, Address out, std::int64_t numel, int threads) const {
    pac::cpu::decode(spec_, isa_, pointer<const void>(packed), pointer<void>(out), numel, threads);
  }

 private:
  pac::Spec spec_;
  pac::cpu::Isa isa_;
};

#if PAC_CUDA_CODEC
void check_cuda(cudaError_t status, const char* expression, const char* file, int line) {
  if (status == cudaSuccess) return;
  // The status was read: cleared from the runtime, the error does not surface in another caller's check.
  [[maybe_unused]] const cudaError_t cleared = cudaGetLastError();
  throw pac::DeviceError(pac::detail::located(file, line, expression, " failed: ", cudaGetErrorName(status), ": ",
                                              cudaGetErrorString(status)));
}

/// Throws pac::DeviceError and clears the runtime's last error, unless the call succeeded.
#define PAC_CUDA_CHECK(call) check_cuda((call), #call, __FILE__, __LINE__)

/// Makes the launch's device current, and the caller's again afterwards.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) : device_(device) {
    PAC_CUDA_CHECK(cudaGetDevice(&previous_));
    if (previous_ != device_) PAC_CUDA_CHECK(cudaSetDevice(device_));
  }
  ~DeviceGuard() {
    // The device was current a moment ago; a destructor could not say more than the launch's own status.
    if (previous_ != device_) static_cast<void>(cudaSetDevice(previous_));
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int device_;
  int previous_ = 0;
};

class CudaCodec {
 public:
  CudaCodec(int dtype, int bits, int group_size, bool stochastic, bool keep_positive, int device)
      : spec_(checked_spec(dtype, bits, group_size, stochastic, keep_positive)), device_(device) {
    PAC_CHECK(device >= 0, "device is the index of a CUDA device, got ", device);
  }

  void encode(Address source, Address out, std::int64_t numel, std::uint32_t key0, std::uint32_t key1,
              Address stream) const {
    const DeviceGuard guard(device_);
    PAC_CUDA_CHECK(pac::cuda::encode(spec_, pointer<const void>(source), {}, pointer<void>(out), numel, {key0, key1},
                                     pointer<CUstream_st>(stream)));
  }

  void encode_rows(Address source, std::int64_t length, std::int64_t gap, Address out, std::int64_t numel,
                   Address stream) const {
    const DeviceGuard guard(device_);
    PAC_CUDA_CHECK(pac::cuda::encode(spec_, pointer<const void>(source), {length, gap}, pointer<void>(out), numel, {},
                                     pointer<CUstream_st>(stream)));
  }

  void decode(Address packed, Address out, std::int64_t numel, Address stream) const {
    const DeviceGuard guard(device_);
    PAC_CUDA_CHECK(
        pac::cuda::decode(spec_, pointer<const void>(packed), pointer<void>(out), numel, pointer<CUstream_st>(stream)));
  }

 private:
  pac::Spec spec_;
  int device_;
};
#endif

void raise_as_pyactcomp_error(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const pac::DeviceError& device_error) {
    py::set_error(py::module_::import("pyactcomp.errors").attr("PyactcompError"), device_error.what());
  }
}

}  // namespace

PYBIND11_MODULE(_core, module) {
  module.doc() =
      "The native codec, raw addresses in and nothing checked on the hot path, and the native allocator; no torch.";
  py::register_local_exception_translator(&raise_as_pyactcomp_error);

  module.attr("FLOAT32") = static_cast<int>(pac::DType::kFloat32);
  module.attr("BFLOAT16") = static_cast<int>(pac::DType::kBFloat16);
  module.attr("FLOAT16") = static_cast<int>(pac::DType::kFloat16);
  module.attr("BOOL") = static_cast<int>(pac::DType::kBool);

  py::class_<CpuCodec>(module, "CpuCodec", "One format on the host; packs and restores without the GIL.")
      .def(py::init<int, int, int, bool, bool, bool>(), py::arg("dtype"), py::arg("bits"), py::arg("group_size"),
           py::arg("stochastic"), py::arg("keep_positive"), py::arg("simd") = true)
      .def("encode", &CpuCodec::encode, py::arg("source"), py::arg("out"), py::arg("numel"), py::arg("key0"),
           py::arg("key1"), py::arg("threads"), py::call_guard<py::gil_scoped_release>())
      .def("decode", &CpuCodec::decode, py::arg("packed"), py::arg("out"), py::arg("numel"), py::arg("threads"),
           py::call_guard<py::gil_scoped_release>());

#if PAC_CUDA_CODEC
  module.attr("has_cuda_codec") = true;
  py::class_<CudaCodec>(module, "CudaCodec", "One format on one CUDA device; launches on a raw stream.")
      .def(py::init<int, int, int, bool, bool, int>(), py::arg("dtype"), py::arg("bits"), py::arg("group_size"),
           py::arg("stochastic"), py::arg("keep_positive"), py::arg("device"))
      .def("encode", &CudaCodec::encode, py::arg("source"), py::arg("out"), py::arg("numel"), py::arg("key0"),
           py::arg("key1"), py::arg("stream"))
      .def("encode_rows", &CudaCodec::encode_rows, py::arg("source"), py::arg("length"), py::arg("gap"), py::arg("out"),
           py::arg("numel"), py::arg("stream"))
      .def("decode", &CudaCodec::decode, py::arg("packed"), py::arg("out"), py::arg("numel"), py::arg("stream"));
#else
  module.attr("has_cuda_codec") = false;
#endif
  pac::bindings::bind_allocator(module);
  pac::bindings::bind_recording(module);
  pac::bindings::bind_replay(module);
}
