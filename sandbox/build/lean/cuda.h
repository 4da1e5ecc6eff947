// Streams, guards and checks of PyTorch's CUDA interface, for the lean header.
#pragma once

#include <cuda_runtime.h>

#include "base.h"
#include "tensor.h"

namespace sandbox_lean {
namespace cuda {

class CUDAStream {
 public:
  CUDAStream(void* stream, DeviceIndex device) : stream_(static_cast<cudaStream_t>(stream)), device_(device) {}
  operator cudaStream_t() const { return stream_; }
  cudaStream_t stream() const { return stream_; }
  DeviceIndex device_index() const { return device_; }
  Device device() const { return {kCUDA, device_}; }
  void synchronize() const { sandbox_lean_check_cuda(cudaStreamSynchronize(stream_), __FILE__, __func__, __LINE__); }
  bool query() const { return cudaStreamQuery(stream_) == cudaSuccess; }
  friend bool operator==(const CUDAStream& a, const CUDAStream& b) { return a.stream_ == b.stream_; }
  friend bool operator!=(const CUDAStream& a, const CUDAStream& b) { return a.stream_ != b.stream_; }

 private:
  cudaStream_t stream_;
  DeviceIndex device_;
};

inline DeviceIndex current_device() { return sandbox_lean_current_device(); }
inline DeviceIndex on(DeviceIndex device) { return device < 0 ? current_device() : device; }
inline void set_device(DeviceIndex device) { sandbox_lean_set_device(device); }
inline DeviceIndex device_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? static_cast<DeviceIndex>(count) : 0;
}
inline CUDAStream getCurrentCUDAStream(DeviceIndex device = -1) { return {sandbox_lean_current_stream(on(device)), on(device)}; }
inline CUDAStream getStreamFromPool(bool high_priority = false, DeviceIndex device = -1) {
  return {sandbox_lean_pool_stream(high_priority, on(device)), on(device)};
}
inline void setCurrentCUDAStream(CUDAStream stream) { sandbox_lean_set_stream(stream.stream(), stream.device_index()); }
inline cudaDeviceProp* getDeviceProperties(DeviceIndex device) {
  return static_cast<cudaDeviceProp*>(sandbox_lean_device_properties(on(device)));
}
inline cudaDeviceProp* getCurrentDeviceProperties() { return getDeviceProperties(-1); }
inline int warp_size() { return getCurrentDeviceProperties()->warpSize; }
inline void device_synchronize() { sandbox_lean_check_cuda(cudaDeviceSynchronize(), __FILE__, __func__, __LINE__); }

class CUDAGuard {
 public:
  explicit CUDAGuard(DeviceIndex device) : before_(current_device()) { set_index(device); }
  explicit CUDAGuard(Device device) : CUDAGuard(device.index()) {}
  ~CUDAGuard() { sandbox_lean_set_device(before_); }
  CUDAGuard(const CUDAGuard&) = delete;
  CUDAGuard& operator=(const CUDAGuard&) = delete;
  void set_index(DeviceIndex device) { sandbox_lean_set_device(on(device)); }
  void set_device(Device device) { set_index(device.index()); }
  Device original_device() const { return {kCUDA, before_}; }

 private:
  DeviceIndex before_;
};
class OptionalCUDAGuard {
 public:
  OptionalCUDAGuard() = default;
  explicit OptionalCUDAGuard(optional<Device> device) {
    if (device && device->is_cuda()) guard_.emplace(*device);
  }
  explicit OptionalCUDAGuard(Device device) : OptionalCUDAGuard(optional<Device>(device)) {}
  explicit OptionalCUDAGuard(DeviceIndex device) { guard_.emplace(device); }

 private:
  optional<CUDAGuard> guard_;
};
class CUDAStreamGuard {
 public:
  explicit CUDAStreamGuard(CUDAStream stream)
      : guard_(stream.device_index()), before_(getCurrentCUDAStream(stream.device_index())) {
    setCurrentCUDAStream(stream);
  }
  ~CUDAStreamGuard() { setCurrentCUDAStream(before_); }
  CUDAStreamGuard(const CUDAStreamGuard&) = delete;
  CUDAStreamGuard& operator=(const CUDAStreamGuard&) = delete;

 private:
  CUDAGuard guard_;
  CUDAStream before_;
};

class CUDAEvent {
 public:
  explicit CUDAEvent(unsigned int flags = cudaEventDisableTiming) : flags_(flags) {}
  CUDAEvent(CUDAEvent&& other) noexcept : flags_(other.flags_), event_(std::exchange(other.event_, nullptr)) {}
  CUDAEvent& operator=(CUDAEvent&& other) noexcept {
    std::swap(flags_, other.flags_);
    std::swap(event_, other.event_);
    return *this;
  }
  ~CUDAEvent() {
    if (event_) cudaEventDestroy(event_);
  }
  operator cudaEvent_t() const { return event_; }
  cudaEvent_t event() const { return event_; }
  bool isCreated() const { return event_ != nullptr; }
  void record() { record(getCurrentCUDAStream()); }
  void record(const CUDAStream& stream) {
    if (!event_) check(cudaEventCreateWithFlags(&event_, flags_));
    check(cudaEventRecord(event_, stream));
  }
  void recordOnce(const CUDAStream& stream) {
    if (!event_) record(stream);
  }
  void block(const CUDAStream& stream) {
    if (event_) check(cudaStreamWaitEvent(stream, event_, 0));
  }
  bool query() const { return !event_ || cudaEventQuery(event_) == cudaSuccess; }
  void synchronize() const {
    if (event_) check(cudaEventSynchronize(event_));
  }
  float elapsed_time(const CUDAEvent& end) const {
    float ms = 0;
    check(cudaEventElapsedTime(&ms, event_, end.event_));
    return ms;
  }

 private:
  static void check(cudaError_t error) { sandbox_lean_check_cuda(error, __FILE__, __func__, __LINE__); }
  unsigned int flags_;
  cudaEvent_t event_ = nullptr;
};

}  // namespace cuda

inline optional<Device> device_of(const Tensor& tensor) {
  return tensor.defined() ? optional<Device>(tensor.device()) : nullopt;
}
}  // namespace sandbox_lean

#define C10_CUDA_CHECK(expression) ::sandbox_lean_check_cuda((expression), __FILE__, __func__, static_cast<uint32_t>(__LINE__))
#define AT_CUDA_CHECK(expression) C10_CUDA_CHECK(expression)
#define TORCH_CUDA_CHECK(expression) C10_CUDA_CHECK(expression)
#define C10_CUDA_KERNEL_LAUNCH_CHECK() C10_CUDA_CHECK(cudaGetLastError())
#define TORCH_CUDA_KERNEL_LAUNCH_CHECK() C10_CUDA_KERNEL_LAUNCH_CHECK()
