// What a source compiled against the lean header (lean.h) calls in the support library (support.cpp), which alone is
// compiled against PyTorch's own headers. A tensor crosses as its implementation's address, with one reference that the
// callee gives away; arguments are borrowed. Functions may throw PyTorch's own exceptions.
#pragma once

#include <cstdint>

#include "ops.h"

extern "C" {

struct SandboxLeanOptions {
  int8_t dtype = -1;        // of ScalarType; -1: not said
  int8_t device_type = -1;  // of DeviceType; -1: not said
  int8_t device_index = -1;
  int8_t requires_grad = 0;
  int8_t pinned = 0;
  int8_t memory_format = -1;  // of MemoryFormat; -1: not said
};

// A number that may be missing (`kind` 0), of floating point (1), whole (2) or a truth value (3).
struct SandboxLeanScalar {
  double number = 0;
  int64_t integer = 0;
  int8_t kind = 0;
};

void sandbox_lean_retain(void* tensor);
void sandbox_lean_release(void* tensor);

void* sandbox_lean_data(void* tensor);
void* sandbox_lean_typed_data(void* tensor, int8_t dtype);  // throws where the tensor's type is another
const int64_t* sandbox_lean_sizes(void* tensor, int64_t* dimensions);
const int64_t* sandbox_lean_strides(void* tensor, int64_t* dimensions);
int64_t sandbox_lean_size(void* tensor, int64_t dimension);
int64_t sandbox_lean_stride(void* tensor, int64_t dimension);
int64_t sandbox_lean_numel(void* tensor);
int64_t sandbox_lean_storage_offset(void* tensor);
int8_t sandbox_lean_dtype(void* tensor);
int8_t sandbox_lean_device(void* tensor, int8_t* index);
bool sandbox_lean_is_contiguous(void* tensor, int8_t memory_format);
void* sandbox_lean_contiguous(void* tensor, int8_t memory_format);
bool sandbox_lean_requires_grad(void* tensor);
double sandbox_lean_item(void* tensor);
int64_t sandbox_lean_integer_item(void* tensor);

void* sandbox_lean_empty(const int64_t* sizes, int64_t dimensions, SandboxLeanOptions options);
void* sandbox_lean_full(const int64_t* sizes, int64_t dimensions, double value, SandboxLeanOptions options);
void* sandbox_lean_random(const int64_t* sizes, int64_t dimensions, bool normal, SandboxLeanOptions options);
void* sandbox_lean_empty_like(void* tensor, SandboxLeanOptions options);
void* sandbox_lean_full_like(void* tensor, double value, SandboxLeanOptions options);
void* sandbox_lean_to(void* tensor, SandboxLeanOptions options, bool non_blocking, bool copy);
void* sandbox_lean_sum_to(void* tensor, const int64_t* dims, int64_t count, bool keepdim);
void* sandbox_lean_mean_to(void* tensor, const int64_t* dims, int64_t count, bool keepdim);
void* sandbox_lean_narrow(void* tensor, int64_t dim, int64_t start, int64_t length);
void* sandbox_lean_slice(void* tensor, int64_t dim, int64_t start, int64_t end, int64_t step);
void* sandbox_lean_cat(void* const* tensors, int64_t count, int64_t dim, bool stack);
void* sandbox_lean_addmm(void* bias, void* left, void* right);
void* sandbox_lean_clamp(void* tensor, SandboxLeanScalar least, SandboxLeanScalar most, bool in_place);

#define SANDBOX_LEAN_DECLARE_UNARY(name) void* sandbox_lean_##name##_u(void* tensor);
#define SANDBOX_LEAN_DECLARE_BINARY(name) void* sandbox_lean_##name##_b(void* tensor, void* other);
#define SANDBOX_LEAN_DECLARE_SCALAR(name) void* sandbox_lean_##name##_s(void* tensor, SandboxLeanScalar value);
#define SANDBOX_LEAN_DECLARE_DIM(name) void* sandbox_lean_##name##_d(void* tensor, int64_t dim);
#define SANDBOX_LEAN_DECLARE_TWO_DIMS(name) void* sandbox_lean_##name##_dd(void* tensor, int64_t first, int64_t second);
#define SANDBOX_LEAN_DECLARE_LIST(name) void* sandbox_lean_##name##_l(void* tensor, const int64_t* sizes, int64_t count);
SANDBOX_LEAN_UNARY(SANDBOX_LEAN_DECLARE_UNARY)
SANDBOX_LEAN_UNARY_METHODS(SANDBOX_LEAN_DECLARE_UNARY)
SANDBOX_LEAN_BINARY(SANDBOX_LEAN_DECLARE_BINARY)
SANDBOX_LEAN_BINARY_METHODS(SANDBOX_LEAN_DECLARE_BINARY)
SANDBOX_LEAN_SCALAR(SANDBOX_LEAN_DECLARE_SCALAR)
SANDBOX_LEAN_SCALAR_METHODS(SANDBOX_LEAN_DECLARE_SCALAR)
SANDBOX_LEAN_DIM(SANDBOX_LEAN_DECLARE_DIM)
SANDBOX_LEAN_TWO_DIMS(SANDBOX_LEAN_DECLARE_TWO_DIMS)
SANDBOX_LEAN_LIST(SANDBOX_LEAN_DECLARE_LIST)

// `kind`: 0 a RuntimeError in Python, 1 an IndexError, 2 a ValueError, 3 a TypeError, 4 a NotImplementedError.
[[noreturn]] void sandbox_lean_fail(int kind, const char* function, const char* file, uint32_t line, const char* message);
void sandbox_lean_warn(const char* message);
void sandbox_lean_parallel_for(int64_t begin, int64_t end, int64_t grain, void (*work)(void*, int64_t, int64_t), void* state);
int sandbox_lean_num_threads();
bool sandbox_lean_set_grad_enabled(bool enabled);  // returns what it was

// Python's side: objects cross as PyObject*.
bool sandbox_lean_is_tensor(void* object);  // may set a Python error, which the caller looks for
void* sandbox_lean_from_python(void* object);
void* sandbox_lean_to_python(void* tensor);
void sandbox_lean_translate_exception();  // of the exception being handled, to a Python error
void sandbox_lean_translate_as_pybind();  // likewise, with pybind11's choices for the standard library's

// In support_cuda.cpp.
void* sandbox_lean_current_stream(int8_t device);
void* sandbox_lean_pool_stream(bool high_priority, int8_t device);
void sandbox_lean_set_stream(void* stream, int8_t device);
int8_t sandbox_lean_current_device();
void sandbox_lean_set_device(int8_t device);
void* sandbox_lean_device_properties(int8_t device);
void sandbox_lean_check_cuda(int32_t error, const char* file, const char* function, uint32_t line);
}
