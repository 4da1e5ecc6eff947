// A tensor for the lean header: a counted reference to PyTorch's own, whose methods are calls of the support library.
#pragma once

#include "accessor.h"
#include "base.h"

namespace sandbox_lean {

class Tensor {
 public:
  Tensor() = default;
  Tensor(std::nullptr_t) {}
  Tensor(const Tensor& other) : impl_(other.impl_) {
    if (impl_) sandbox_lean_retain(impl_);
  }
  Tensor(Tensor&& other) noexcept : impl_(std::exchange(other.impl_, nullptr)) {}
  Tensor& operator=(Tensor other) noexcept {
    std::swap(impl_, other.impl_);
    return *this;
  }
  ~Tensor() {
    if (impl_) sandbox_lean_release(impl_);
  }
  // Takes over a reference.
  static Tensor of(void* impl) {
    Tensor made;
    made.impl_ = impl;
    return made;
  }
  void* unsafe() const { return impl_; }

  bool defined() const { return impl_ != nullptr; }
  void reset() { *this = Tensor(); }
  bool is_same(const Tensor& other) const { return impl_ == other.impl_; }

  int64_t size(int64_t dimension) const { return sandbox_lean_size(checked(), dimension); }
  int64_t stride(int64_t dimension) const { return sandbox_lean_stride(checked(), dimension); }
  IntArrayRef sizes() const {
    int64_t count = 0;
    const int64_t* data = sandbox_lean_sizes(checked(), &count);
    return {data, static_cast<size_t>(count)};
  }
  IntArrayRef strides() const {
    int64_t count = 0;
    const int64_t* data = sandbox_lean_strides(checked(), &count);
    return {data, static_cast<size_t>(count)};
  }
  int64_t dim() const { return static_cast<int64_t>(sizes().size()); }
  int64_t ndimension() const { return dim(); }
  int64_t numel() const { return sandbox_lean_numel(checked()); }
  int64_t storage_offset() const { return sandbox_lean_storage_offset(checked()); }
  size_t element_size() const {
    switch (scalar_type()) {
#define SANDBOX_LEAN_SIZE(T, name) case ScalarType::name: return sizeof(T);
      SANDBOX_LEAN_TYPES(SANDBOX_LEAN_SIZE)
#undef SANDBOX_LEAN_SIZE
#ifndef SANDBOX_LEAN_SHORT
      case kHalf: case kBFloat16: return 2;
#endif
      default: return 0;
    }
  }
  size_t itemsize() const { return element_size(); }
  size_t nbytes() const { return static_cast<size_t>(numel()) * element_size(); }
  ScalarType scalar_type() const { return static_cast<ScalarType>(sandbox_lean_dtype(checked())); }
  TypeMeta dtype() const { return scalar_type(); }
  bool is_floating_point() const {
    const ScalarType type = scalar_type();
    return type == kHalf || type == kBFloat16 || type == kFloat || type == kDouble;
  }
  Device device() const {
    int8_t index = -1;
    const int8_t type = sandbox_lean_device(checked(), &index);
    return {static_cast<DeviceType>(type), index};
  }
  int64_t get_device() const { return device().index(); }
  bool is_cuda() const { return device().is_cuda(); }
  bool is_cpu() const { return device().is_cpu(); }
  Layout layout() const { return kStrided; }
  bool is_contiguous(MemoryFormat format = MemoryFormat::Contiguous) const {
    return sandbox_lean_is_contiguous(checked(), static_cast<int8_t>(format));
  }
  Tensor contiguous(MemoryFormat format = MemoryFormat::Contiguous) const {
    return of(sandbox_lean_contiguous(checked(), static_cast<int8_t>(format)));
  }
  DeprecatedTypeProperties type() const { return {scalar_type(), device().type()}; }
  bool requires_grad() const { return sandbox_lean_requires_grad(checked()); }
  TensorOptions options() const { return TensorOptions(scalar_type()).device(device()); }

  void* data_ptr() const { return sandbox_lean_data(checked()); }
  const void* const_data_ptr() const { return data_ptr(); }
  void* mutable_data_ptr() const { return data_ptr(); }
  template <typename T>
  T* data_ptr() const {
    using Element = std::remove_const_t<T>;
    return static_cast<T*>(sandbox_lean_typed_data(checked(), static_cast<int8_t>(ScalarTypeOf<Element>::value)));
  }
  template <typename T>
  T* data() const { return data_ptr<T>(); }
  template <typename T>
  T* mutable_data_ptr() const { return data_ptr<T>(); }
  template <typename T>
  const std::remove_const_t<T>* const_data_ptr() const { return data_ptr<std::remove_const_t<T>>(); }

  template <typename T, size_t N>
  TensorAccessor<T, N> accessor() const {
    expect_dimensions(N);
    return {data_ptr<T>(), sizes().data(), strides().data()};
  }
  template <typename T, size_t N, template <typename> class Traits = DefaultPtrTraits>
  PackedTensorAccessor32<T, N, Traits> packed_accessor32() const {
    expect_dimensions(N);
    TORCH_CHECK(numel() <= INT32_MAX, "numel needs to be smaller than int32_t max; otherwise, please use packed_accessor64");
    return {data_ptr<T>(), sizes().data(), strides().data()};
  }
  template <typename T, size_t N, template <typename> class Traits = DefaultPtrTraits>
  PackedTensorAccessor64<T, N, Traits> packed_accessor64() const {
    expect_dimensions(N);
    return {data_ptr<T>(), sizes().data(), strides().data()};
  }

  template <typename T>
  T item() const {
    return is_floating_point() ? static_cast<T>(sandbox_lean_item(checked())) : static_cast<T>(sandbox_lean_integer_item(checked()));
  }
  Scalar item() const {
    return is_floating_point() ? Scalar(sandbox_lean_item(checked())) : Scalar(sandbox_lean_integer_item(checked()));
  }

  Tensor to(ScalarType type, bool non_blocking = false, bool copy = false) const { return to(TensorOptions(type), non_blocking, copy); }
  Tensor to(TypeMeta type, bool non_blocking = false, bool copy = false) const { return to(TensorOptions(type), non_blocking, copy); }
  Tensor to(Device on, bool non_blocking = false, bool copy = false) const { return to(TensorOptions(on), non_blocking, copy); }
  Tensor to(DeviceType on, bool non_blocking = false, bool copy = false) const { return to(TensorOptions(on), non_blocking, copy); }
  Tensor to(Device on, ScalarType type, bool non_blocking = false, bool copy = false) const {
    return to(TensorOptions(on).dtype(type), non_blocking, copy);
  }
  Tensor to(TensorOptions wanted, bool non_blocking = false, bool copy = false) const {
    return of(sandbox_lean_to(checked(), wanted.said, non_blocking, copy));
  }
  Tensor toType(ScalarType type) const { return to(type); }

  Tensor narrow(int64_t dim, int64_t start, int64_t length) const { return of(sandbox_lean_narrow(checked(), dim, start, length)); }
  Tensor slice(int64_t dim = 0, optional<int64_t> start = nullopt, optional<int64_t> end = nullopt, int64_t step = 1) const {
    return of(sandbox_lean_slice(checked(), dim, start.value_or(0), end.value_or(INT64_MAX), step));
  }
  Tensor operator[](int64_t index) const { return select(0, index); }
  Tensor clamp(optional<Scalar> least = nullopt, optional<Scalar> most = nullopt) const {
    return of(sandbox_lean_clamp(checked(), Scalar::said(least), Scalar::said(most), false));
  }
  Tensor clamp_(optional<Scalar> least = nullopt, optional<Scalar> most = nullopt) const {
    return of(sandbox_lean_clamp(checked(), Scalar::said(least), Scalar::said(most), true));
  }
  Tensor sum(IntArrayRef dims, bool keepdim = false) const {
    return of(sandbox_lean_sum_to(checked(), dims.data(), static_cast<int64_t>(dims.size()), keepdim));
  }
  Tensor mean(IntArrayRef dims, bool keepdim = false) const {
    return of(sandbox_lean_mean_to(checked(), dims.data(), static_cast<int64_t>(dims.size()), keepdim));
  }

#define SANDBOX_LEAN_UNARY_METHOD(name) \
  Tensor name() const { return of(sandbox_lean_##name##_u(checked())); }
#define SANDBOX_LEAN_BINARY_METHOD(name) \
  Tensor name(const Tensor& other) const { return of(sandbox_lean_##name##_b(checked(), other.checked())); }
#define SANDBOX_LEAN_SCALAR_METHOD(name) \
  Tensor name(Scalar value) const { return of(sandbox_lean_##name##_s(checked(), value.said())); }
#define SANDBOX_LEAN_DIM_METHOD(name) \
  Tensor name(int64_t dim) const { return of(sandbox_lean_##name##_d(checked(), dim)); }
#define SANDBOX_LEAN_TWO_DIMS_METHOD(name) \
  Tensor name(int64_t first, int64_t second) const { return of(sandbox_lean_##name##_dd(checked(), first, second)); }
#define SANDBOX_LEAN_LIST_METHOD(name) \
  Tensor name(IntArrayRef sizes) const { return of(sandbox_lean_##name##_l(checked(), sizes.data(), static_cast<int64_t>(sizes.size()))); }
  SANDBOX_LEAN_UNARY(SANDBOX_LEAN_UNARY_METHOD)
  SANDBOX_LEAN_UNARY_METHODS(SANDBOX_LEAN_UNARY_METHOD)
  SANDBOX_LEAN_BINARY(SANDBOX_LEAN_BINARY_METHOD)
  SANDBOX_LEAN_BINARY_METHODS(SANDBOX_LEAN_BINARY_METHOD)
  SANDBOX_LEAN_SCALAR(SANDBOX_LEAN_SCALAR_METHOD)
  SANDBOX_LEAN_SCALAR_METHODS(SANDBOX_LEAN_SCALAR_METHOD)
  SANDBOX_LEAN_DIM(SANDBOX_LEAN_DIM_METHOD)
  SANDBOX_LEAN_TWO_DIMS(SANDBOX_LEAN_TWO_DIMS_METHOD)
  SANDBOX_LEAN_LIST(SANDBOX_LEAN_LIST_METHOD)

 private:
  void* checked() const {
    if (!impl_) SANDBOX_LEAN_FAIL("the tensor is undefined");
    return impl_;
  }
  void expect_dimensions(size_t n) const {
    TORCH_CHECK(dim() == static_cast<int64_t>(n), "TensorAccessor expected ", n, " dims but tensor has ", dim());
  }
  void* impl_ = nullptr;
};

using TensorList = ArrayRef<Tensor>;

#define SANDBOX_LEAN_UNARY_FUNCTION(name) \
  inline Tensor name(const Tensor& self) { return self.name(); }
#define SANDBOX_LEAN_BINARY_FUNCTION(name) \
  inline Tensor name(const Tensor& self, const Tensor& other) { return self.name(other); }
#define SANDBOX_LEAN_SCALAR_FUNCTION(name) \
  inline Tensor name(const Tensor& self, Scalar value) { return self.name(value); }
#define SANDBOX_LEAN_DIM_FUNCTION(name) \
  inline Tensor name(const Tensor& self, int64_t dim) { return self.name(dim); }
#define SANDBOX_LEAN_TWO_DIMS_FUNCTION(name) \
  inline Tensor name(const Tensor& self, int64_t first, int64_t second) { return self.name(first, second); }
SANDBOX_LEAN_UNARY(SANDBOX_LEAN_UNARY_FUNCTION)
SANDBOX_LEAN_BINARY(SANDBOX_LEAN_BINARY_FUNCTION)
SANDBOX_LEAN_SCALAR(SANDBOX_LEAN_SCALAR_FUNCTION)
SANDBOX_LEAN_DIM(SANDBOX_LEAN_DIM_FUNCTION)
SANDBOX_LEAN_TWO_DIMS(SANDBOX_LEAN_TWO_DIMS_FUNCTION)
inline Tensor reshape(const Tensor& self, IntArrayRef sizes) { return self.reshape(sizes); }
inline Tensor permute(const Tensor& self, IntArrayRef dims) { return self.permute(dims); }
inline Tensor flip(const Tensor& self, IntArrayRef dims) { return self.flip(dims); }
inline Tensor clamp(const Tensor& self, optional<Scalar> least, optional<Scalar> most = nullopt) { return self.clamp(least, most); }
inline Tensor clamp_(const Tensor& self, optional<Scalar> least, optional<Scalar> most = nullopt) { return self.clamp_(least, most); }
inline Tensor sum(const Tensor& self, IntArrayRef dims, bool keepdim = false) { return self.sum(dims, keepdim); }
inline Tensor mean(const Tensor& self, IntArrayRef dims, bool keepdim = false) { return self.mean(dims, keepdim); }

#define SANDBOX_LEAN_OPERATOR(symbol, name)                                                        \
  inline Tensor operator symbol(const Tensor& a, const Tensor& b) { return a.name(b); }            \
  inline Tensor operator symbol(const Tensor& a, Scalar b) { return a.name(b); }
SANDBOX_LEAN_OPERATOR(+, add)
SANDBOX_LEAN_OPERATOR(-, sub)
SANDBOX_LEAN_OPERATOR(*, mul)
SANDBOX_LEAN_OPERATOR(/, div)
inline Tensor operator+(Scalar a, const Tensor& b) { return b.add(a); }
inline Tensor operator*(Scalar a, const Tensor& b) { return b.mul(a); }
inline Tensor operator-(Scalar a, const Tensor& b) { return b.neg().add(a); }
inline Tensor operator/(Scalar a, const Tensor& b) { return b.reciprocal().mul(a); }
inline Tensor operator-(const Tensor& a) { return a.neg(); }
#define SANDBOX_LEAN_ASSIGNMENT(symbol, name)                                                      \
  inline Tensor& operator symbol(Tensor& a, const Tensor& b) { return a.name(b), a; }              \
  inline Tensor& operator symbol(Tensor& a, Scalar b) { return a.name(b), a; }                     \
  inline Tensor operator symbol(Tensor&& a, const Tensor& b) { return a.name(b); }                 \
  inline Tensor operator symbol(Tensor&& a, Scalar b) { return a.name(b); }
SANDBOX_LEAN_ASSIGNMENT(+=, add_)
SANDBOX_LEAN_ASSIGNMENT(-=, sub_)
SANDBOX_LEAN_ASSIGNMENT(*=, mul_)
SANDBOX_LEAN_ASSIGNMENT(/=, div_)

inline Tensor empty(IntArrayRef sizes, TensorOptions options = {}) {
  return Tensor::of(sandbox_lean_empty(sizes.data(), static_cast<int64_t>(sizes.size()), options.said));
}
inline Tensor full(IntArrayRef sizes, Scalar value, TensorOptions options = {}) {
  if (options.said.dtype < 0) options = options.dtype(value.isBoolean() ? kBool : value.isIntegral() ? kLong : kFloat);
  return Tensor::of(sandbox_lean_full(sizes.data(), static_cast<int64_t>(sizes.size()), value.toDouble(), options.said));
}
inline Tensor zeros(IntArrayRef sizes, TensorOptions options = {}) { return full(sizes, 0.0, options); }
inline Tensor ones(IntArrayRef sizes, TensorOptions options = {}) { return full(sizes, 1.0, options); }
inline Tensor rand(IntArrayRef sizes, TensorOptions options = {}) {
  return Tensor::of(sandbox_lean_random(sizes.data(), static_cast<int64_t>(sizes.size()), false, options.said));
}
inline Tensor randn(IntArrayRef sizes, TensorOptions options = {}) {
  return Tensor::of(sandbox_lean_random(sizes.data(), static_cast<int64_t>(sizes.size()), true, options.said));
}
inline Tensor empty_like(const Tensor& self, TensorOptions options = {}) { return Tensor::of(sandbox_lean_empty_like(self.unsafe(), options.said)); }
inline Tensor full_like(const Tensor& self, Scalar value, TensorOptions options = {}) {
  return Tensor::of(sandbox_lean_full_like(self.unsafe(), value.toDouble(), options.said));
}
inline Tensor zeros_like(const Tensor& self, TensorOptions options = {}) { return full_like(self, 0.0, options); }
inline Tensor ones_like(const Tensor& self, TensorOptions options = {}) { return full_like(self, 1.0, options); }
inline Tensor cat(TensorList tensors, int64_t dim = 0) {
  return Tensor::of(sandbox_lean_cat(reinterpret_cast<void* const*>(tensors.data()), static_cast<int64_t>(tensors.size()), dim, false));
}
inline Tensor stack(TensorList tensors, int64_t dim = 0) {
  return Tensor::of(sandbox_lean_cat(reinterpret_cast<void* const*>(tensors.data()), static_cast<int64_t>(tensors.size()), dim, true));
}
inline Tensor addmm(const Tensor& bias, const Tensor& left, const Tensor& right) {
  return Tensor::of(sandbox_lean_addmm(bias.unsafe(), left.unsafe(), right.unsafe()));
}

class AutoGradMode {
 public:
  explicit AutoGradMode(bool enabled) : before_(sandbox_lean_set_grad_enabled(enabled)) {}
  ~AutoGradMode() { sandbox_lean_set_grad_enabled(before_); }
  AutoGradMode(const AutoGradMode&) = delete;
  AutoGradMode& operator=(const AutoGradMode&) = delete;

 private:
  bool before_;
};
class NoGradGuard : public AutoGradMode {
 public:
  NoGradGuard() : AutoGradMode(false) {}
};

template <typename F>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const F& work) {
  sandbox_lean_parallel_for(
      begin, end, grain, [](void* state, int64_t from, int64_t to) { (*static_cast<const F*>(state))(from, to); },
      const_cast<void*>(static_cast<const void*>(&work)));
}
inline int get_num_threads() { return sandbox_lean_num_threads(); }

}  // namespace sandbox_lean
