// The part of abi.h that needs CUDA.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include "abi.h"

// Declared here because their header asks for cuSPARSE's and others'.
namespace at::cuda {
cudaDeviceProp* getDeviceProperties(c10::DeviceIndex device);
}

extern "C" {

void* sandbox_lean_current_stream(int8_t device) { return c10::cuda::getCurrentCUDAStream(device).stream(); }
void* sandbox_lean_pool_stream(bool high_priority, int8_t device) {
  return c10::cuda::getStreamFromPool(high_priority, device).stream();
}
void sandbox_lean_set_stream(void* stream, int8_t device) {
  c10::cuda::setCurrentCUDAStream(c10::cuda::getStreamFromExternal(static_cast<cudaStream_t>(stream), device));
}
int8_t sandbox_lean_current_device() { return c10::cuda::current_device(); }
void sandbox_lean_set_device(int8_t device) { c10::cuda::set_device(device); }
void* sandbox_lean_device_properties(int8_t device) { return at::cuda::getDeviceProperties(device); }
void sandbox_lean_check_cuda(int32_t error, const char* file, const char* function, uint32_t line) {
  c10::cuda::c10_cuda_check_implementation(error, file, function, static_cast<int>(line), false);
}
}
