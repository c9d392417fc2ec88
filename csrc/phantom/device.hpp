// A CUDA device that is not there: a guard and the hooks that torch asks about CUDA, and the choice of attention.
#pragma once

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "phantom/memory.hpp"

namespace pac::phantom {

/// One device and one stream; events have always happened.
class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  using Stream = c10::Stream;
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  Stream getStream(c10::Device) const override { return stream(); }
  Stream getDefaultStream(c10::Device) const override { return stream(); }
  Stream getNewStream(c10::Device, int) const override { return stream(); }
  Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(); }
  Stream exchangeStream(Stream) const override { return stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const Stream&, c10::DeviceIndex, c10::EventFlag) const override { *event = nullptr; }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}

 private:
  static Stream stream() { return Stream(Stream::DEFAULT, device()); }
};

/// What torch is told of the build: one device, with the cuDNN that PyTorch's wheels bring.
class Hooks final : public at::CUDAHooksInterface {
 public:
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasCuDNN() const override { return true; }
  bool compiledWithCuDNN() const override { return true; }
  bool supportsDilatedConvolutionWithCuDNN() const override { return true; }
  bool supportsDepthwiseConvolutionWithCuDNN() const override { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override { return true; }
  bool supportsBFloat16RNNWithCuDNN() const override { return true; }
  long versionCuDNN() const override { return kCudnn; }
  long versionRuntimeCuDNN() const override { return kCudnn; }
  long versionCuDNNFrontend() const override { return 11600; }
  long versionCUDART() const override { return 13000; }
  std::string showConfig() const override { return "phantom"; }
  double batchnormMinEpsilonCuDNN() const override { return 0.0; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  at::Device getDeviceFromPtr(void*) const override { return device(); }
  bool isPinnedPtr(const void*) const override { return false; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &allocator(); }

 private:
  static constexpr long kCudnn = 91900;
};

/// The version of a device's instructions: 9 and 0 for Hopper.
struct Capability {
  int major = 9, minor = 0;
};

inline Capability& capability() {
  static Capability current;
  return current;
}

/// Return the kernel that torch's CUDA build takes for an attention (sdp_utils.cpp). All need dense last dimensions,
/// also of the mask: T5 adds a bias that is a permuted view. cuDNN comes first on Hopper and on the Blackwells of data
/// centres, and takes 16-bit heads of a multiple of 8 up to 128 elements; FlashAttention takes no mask, and needs
/// Ampere.
inline std::int64_t choose_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                     const std::optional<at::Tensor>& mask, double, bool causal, std::optional<double>,
                                     bool grouped) {
  const auto& context = at::globalContext();
  const bool masked = mask.has_value() && mask->defined();
  const auto head = query.sym_size(-1).expect_int();
  const auto dense = [](const at::Tensor& each) { return each.stride(-1) == 1; };
  const bool half = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  const bool same = key.sym_size(-1) == value.sym_size(-1), shared = grouped && key.size(-3) != query.size(-3);
  const bool square = !causal || query.size(-2) == key.size(-2);
  const int major = capability().major;
  if (query.dim() != 4 || !dense(query) || !dense(key) || !dense(value) || (masked && !dense(*mask))) {
    return static_cast<std::int64_t>(at::SDPBackend::math);
  }
  if (half && (major == 9 || major == 10) && context.userEnabledCuDNNSDP() && head % 8 == 0 && head <= 128 && same &&
      !(masked && mask->requires_grad())) {
    return static_cast<std::int64_t>(at::SDPBackend::cudnn_attention);
  }
  if (half && major >= 8 && context.userEnabledFlashSDP() && !masked && head <= 256 && same && square) {
    return static_cast<std::int64_t>(at::SDPBackend::flash_attention);
  }
  if (context.userEnabledMemEfficientSDP() && !shared && query.scalar_type() != at::kDouble &&
      head % (half ? 8 : 4) == 0) {
    return static_cast<std::int64_t>(at::SDPBackend::efficient_attention);
  }
  return static_cast<std::int64_t>(at::SDPBackend::math);
}

/// Put the device in place of CUDA's. Before torch first asks about CUDA, which it does while it is imported: torch
/// keeps the first answer. A higher priority wins, whether torch's own hooks come before or after.
inline void register_device() {
  static auto* const guard = std::make_unique<Guard>().release();
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(guard);
  c10::SetAllocator(c10::DeviceType::CUDA, &allocator(), UINT8_MAX);
  at::CUDAHooksRegistry()->Register(
      "CUDAHooks",
      [](at::CUDAHooksArgs) -> std::unique_ptr<at::CUDAHooksInterface> { return std::make_unique<Hooks>(); },
      c10::REGISTRY_PREFERRED);
}

inline void register_attention() { at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention); }

}  // namespace pac::phantom
