// What abi.h declares, by PyTorch itself. Compiled once for an installation of it and linked into every extension that was
// compiled against the lean header.
#include <Python.h>

#include <torch/types.h>

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <new>
#include <stdexcept>

#include "abi.h"

extern PyObject* THPVariableClass;
PyObject* THPVariable_Wrap(const at::TensorBase& tensor);
namespace torch {
void translate_exception_to_python(const std::exception_ptr& error);
}

namespace {

static_assert(sizeof(at::Tensor) == sizeof(void*));
static_assert(int(at::ScalarType::Byte) == 0 && int(at::ScalarType::Long) == 4 && int(at::ScalarType::Half) == 5);
static_assert(int(at::ScalarType::Float) == 6 && int(at::ScalarType::Double) == 7 && int(at::ScalarType::Bool) == 11);
static_assert(int(at::ScalarType::BFloat16) == 15);
static_assert(int(at::MemoryFormat::Contiguous) == 0 && int(at::MemoryFormat::Preserve) == 1);
static_assert(int(at::MemoryFormat::ChannelsLast) == 2 && int(at::MemoryFormat::ChannelsLast3d) == 3);
static_assert(int(at::DeviceType::CPU) == 0 && int(at::DeviceType::CUDA) == 1);

// Layout of torch.Tensor up to its payload, which toolchain.py compares with PyTorch's own declaration.
struct TensorObject {
  PyObject_HEAD
  at::Tensor cdata;
};

// A tensor is one pointer to its implementation, so a pointer can be looked at as one.
const at::Tensor& as(void* const& impl) { return reinterpret_cast<const at::Tensor&>(impl); }

void* give(at::Tensor tensor) { return tensor.defined() ? tensor.unsafeReleaseTensorImpl() : nullptr; }

at::IntArrayRef list(const int64_t* data, int64_t count) { return {data, static_cast<size_t>(count)}; }

at::TensorOptions options_of(const SandboxLeanOptions& said) {
  at::TensorOptions options;
  if (said.dtype >= 0) options = options.dtype(static_cast<at::ScalarType>(said.dtype));
  if (said.device_type >= 0) options = options.device(at::Device(static_cast<at::DeviceType>(said.device_type), said.device_index));
  if (said.requires_grad) options = options.requires_grad(true);
  if (said.pinned) options = options.pinned_memory(true);
  if (said.memory_format >= 0) options = options.memory_format(static_cast<at::MemoryFormat>(said.memory_format));
  return options;
}

at::Scalar number(const SandboxLeanScalar& said) {
  return said.kind == 3 ? at::Scalar(said.integer != 0) : said.kind == 2 ? at::Scalar(said.integer) : at::Scalar(said.number);
}
std::optional<at::Scalar> number_if(const SandboxLeanScalar& said) {
  return said.kind ? std::optional<at::Scalar>(number(said)) : std::nullopt;
}

}  // namespace

extern "C" {

void sandbox_lean_retain(void* tensor) { c10::raw::intrusive_ptr::incref(static_cast<c10::TensorImpl*>(tensor)); }
void sandbox_lean_release(void* tensor) { c10::raw::intrusive_ptr::decref(static_cast<c10::TensorImpl*>(tensor)); }

void* sandbox_lean_data(void* tensor) { return as(tensor).mutable_data_ptr(); }
void* sandbox_lean_typed_data(void* tensor, int8_t dtype) {
  const auto wanted = static_cast<at::ScalarType>(dtype);
  TORCH_CHECK(as(tensor).scalar_type() == wanted, "expected scalar type ", wanted, " but found ", as(tensor).scalar_type());
  return as(tensor).mutable_data_ptr();
}
const int64_t* sandbox_lean_sizes(void* tensor, int64_t* dimensions) {
  *dimensions = as(tensor).dim();
  return as(tensor).sizes().data();
}
const int64_t* sandbox_lean_strides(void* tensor, int64_t* dimensions) {
  *dimensions = as(tensor).dim();
  return as(tensor).strides().data();
}
int64_t sandbox_lean_size(void* tensor, int64_t dimension) { return as(tensor).size(dimension); }
int64_t sandbox_lean_stride(void* tensor, int64_t dimension) { return as(tensor).stride(dimension); }
int64_t sandbox_lean_numel(void* tensor) { return as(tensor).numel(); }
int64_t sandbox_lean_storage_offset(void* tensor) { return as(tensor).storage_offset(); }
int8_t sandbox_lean_dtype(void* tensor) { return static_cast<int8_t>(as(tensor).scalar_type()); }
int8_t sandbox_lean_device(void* tensor, int8_t* index) {
  const at::Device device = as(tensor).device();
  *index = device.index();
  return static_cast<int8_t>(device.type());
}
bool sandbox_lean_is_contiguous(void* tensor, int8_t memory_format) {
  return as(tensor).is_contiguous(static_cast<at::MemoryFormat>(memory_format));
}
void* sandbox_lean_contiguous(void* tensor, int8_t memory_format) {
  return give(as(tensor).contiguous(static_cast<at::MemoryFormat>(memory_format)));
}
bool sandbox_lean_requires_grad(void* tensor) { return as(tensor).requires_grad(); }
double sandbox_lean_item(void* tensor) { return as(tensor).item().toDouble(); }
int64_t sandbox_lean_integer_item(void* tensor) { return as(tensor).item().toLong(); }

void* sandbox_lean_empty(const int64_t* sizes, int64_t dimensions, SandboxLeanOptions options) {
  return give(torch::empty(list(sizes, dimensions), options_of(options)));
}
void* sandbox_lean_full(const int64_t* sizes, int64_t dimensions, double value, SandboxLeanOptions options) {
  return give(torch::full(list(sizes, dimensions), value, options_of(options)));
}
void* sandbox_lean_random(const int64_t* sizes, int64_t dimensions, bool normal, SandboxLeanOptions options) {
  const auto shape = list(sizes, dimensions);
  return give(normal ? torch::randn(shape, options_of(options)) : torch::rand(shape, options_of(options)));
}
void* sandbox_lean_empty_like(void* tensor, SandboxLeanOptions options) { return give(torch::empty_like(as(tensor), options_of(options))); }
void* sandbox_lean_full_like(void* tensor, double value, SandboxLeanOptions options) {
  return give(torch::full_like(as(tensor), value, options_of(options)));
}
void* sandbox_lean_to(void* tensor, SandboxLeanOptions options, bool non_blocking, bool copy) {
  return give(as(tensor).to(options_of(options), non_blocking, copy));
}
void* sandbox_lean_sum_to(void* tensor, const int64_t* dims, int64_t count, bool keepdim) {
  return give(as(tensor).sum(list(dims, count), keepdim));
}
void* sandbox_lean_mean_to(void* tensor, const int64_t* dims, int64_t count, bool keepdim) {
  return give(as(tensor).mean(list(dims, count), keepdim));
}
void* sandbox_lean_narrow(void* tensor, int64_t dim, int64_t start, int64_t length) { return give(as(tensor).narrow(dim, start, length)); }
void* sandbox_lean_slice(void* tensor, int64_t dim, int64_t start, int64_t end, int64_t step) {
  return give(as(tensor).slice(dim, start, end, step));
}
void* sandbox_lean_cat(void* const* tensors, int64_t count, int64_t dim, bool stack) {
  std::vector<at::Tensor> all;
  for (int64_t index = 0; index < count; ++index) all.push_back(as(tensors[index]));
  return give(stack ? at::stack(all, dim) : at::cat(all, dim));
}
void* sandbox_lean_addmm(void* bias, void* left, void* right) { return give(at::addmm(as(bias), as(left), as(right))); }

void* sandbox_lean_clamp(void* tensor, SandboxLeanScalar least, SandboxLeanScalar most, bool in_place) {
  const auto from = number_if(least), to = number_if(most);
  return give(in_place ? at::clamp_(const_cast<at::Tensor&>(as(tensor)), from, to) : at::clamp(as(tensor), from, to));
}

#define SANDBOX_LEAN_DEFINE_UNARY(name) \
  void* sandbox_lean_##name##_u(void* tensor) { return give(as(tensor).name()); }
#define SANDBOX_LEAN_DEFINE_BINARY(name) \
  void* sandbox_lean_##name##_b(void* tensor, void* other) { return give(as(tensor).name(as(other))); }
#define SANDBOX_LEAN_DEFINE_SCALAR(name) \
  void* sandbox_lean_##name##_s(void* tensor, SandboxLeanScalar value) { return give(as(tensor).name(number(value))); }
#define SANDBOX_LEAN_DEFINE_DIM(name) \
  void* sandbox_lean_##name##_d(void* tensor, int64_t dim) { return give(as(tensor).name(dim)); }
#define SANDBOX_LEAN_DEFINE_TWO_DIMS(name) \
  void* sandbox_lean_##name##_dd(void* tensor, int64_t first, int64_t second) { return give(as(tensor).name(first, second)); }
#define SANDBOX_LEAN_DEFINE_LIST(name) \
  void* sandbox_lean_##name##_l(void* tensor, const int64_t* sizes, int64_t count) { return give(as(tensor).name(list(sizes, count))); }

SANDBOX_LEAN_UNARY(SANDBOX_LEAN_DEFINE_UNARY)
SANDBOX_LEAN_UNARY_METHODS(SANDBOX_LEAN_DEFINE_UNARY)
SANDBOX_LEAN_BINARY(SANDBOX_LEAN_DEFINE_BINARY)
SANDBOX_LEAN_BINARY_METHODS(SANDBOX_LEAN_DEFINE_BINARY)
SANDBOX_LEAN_SCALAR(SANDBOX_LEAN_DEFINE_SCALAR)
SANDBOX_LEAN_SCALAR_METHODS(SANDBOX_LEAN_DEFINE_SCALAR)
SANDBOX_LEAN_DIM(SANDBOX_LEAN_DEFINE_DIM)
SANDBOX_LEAN_TWO_DIMS(SANDBOX_LEAN_DEFINE_TWO_DIMS)
SANDBOX_LEAN_LIST(SANDBOX_LEAN_DEFINE_LIST)

void sandbox_lean_fail(int kind, const char* function, const char* file, uint32_t line, const char* message) {
  const c10::SourceLocation where{function, file, line};
  if (kind == 1) throw c10::IndexError(where, message);
  if (kind == 2) throw c10::ValueError(where, message);
  if (kind == 3) throw c10::TypeError(where, message);
  if (kind == 4) throw c10::NotImplementedError(where, message);
  throw c10::Error(where, message);
}
void sandbox_lean_warn(const char* message) { TORCH_WARN(message); }
void sandbox_lean_parallel_for(int64_t begin, int64_t end, int64_t grain, void (*work)(void*, int64_t, int64_t), void* state) {
  at::parallel_for(begin, end, grain, [&](int64_t from, int64_t to) { work(state, from, to); });
}
int sandbox_lean_num_threads() { return at::get_num_threads(); }
bool sandbox_lean_set_grad_enabled(bool enabled) {
  const bool before = at::GradMode::is_enabled();
  at::GradMode::set_enabled(enabled);
  return before;
}

bool sandbox_lean_is_tensor(void* object) { return PyObject_IsInstance(static_cast<PyObject*>(object), THPVariableClass) == 1; }
void* sandbox_lean_from_python(void* object) { return give(static_cast<TensorObject*>(object)->cdata); }
void* sandbox_lean_to_python(void* tensor) {
  if (tensor == nullptr) return THPVariable_Wrap(at::Tensor());
  return THPVariable_Wrap(as(tensor));
}
void sandbox_lean_translate_exception() { torch::translate_exception_to_python(std::current_exception()); }
void sandbox_lean_translate_as_pybind() {
  const auto set = [](PyObject* type, const std::exception& error) { PyErr_SetString(type, error.what()); };
  try {
    throw;
  } catch (const c10::Error&) {
    sandbox_lean_translate_exception();
  } catch (const std::bad_alloc& error) {
    set(PyExc_MemoryError, error);
  } catch (const std::domain_error& error) {
    set(PyExc_ValueError, error);
  } catch (const std::invalid_argument& error) {
    set(PyExc_ValueError, error);
  } catch (const std::length_error& error) {
    set(PyExc_ValueError, error);
  } catch (const std::out_of_range& error) {
    set(PyExc_IndexError, error);
  } catch (const std::range_error& error) {
    set(PyExc_ValueError, error);
  } catch (const std::overflow_error& error) {
    set(PyExc_OverflowError, error);
  } catch (const std::exception& error) {
    set(PyExc_RuntimeError, error);
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "Caught an unknown exception!");
  }
}
}
