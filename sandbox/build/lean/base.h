// Types of PyTorch's C++ interface that are no tensors, for the lean header: element types, devices, options, views of
// arrays, errors. Everything lives in a namespace of its own, so that no symbol is mistaken for PyTorch's, and is found
// under PyTorch's names through lean.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

// SANDBOX_LEAN_LIGHT: the source uses neither strings nor streams, and 16-bit element types only with SANDBOX_LEAN_SHORT.
#ifdef SANDBOX_LEAN_LIGHT
#include "text.h"
#else
#define SANDBOX_LEAN_SHORT
#include <ostream>
#include <sstream>
#include <string>
#endif
#ifdef SANDBOX_LEAN_SHORT
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#endif

#include "abi.h"

namespace sandbox_lean {

#ifdef SANDBOX_LEAN_LIGHT
using Stream = Text;
#else
using Stream = std::ostream;
#endif
#ifdef SANDBOX_LEAN_SHORT
using c10::BFloat16;
using c10::Half;
#endif
using std::nullopt;
using std::optional;

// Numbered as PyTorch numbers them; support.cpp checks.
enum class ScalarType : int8_t {
  Byte = 0, Char = 1, Short = 2, Int = 3, Long = 4, Half = 5, Float = 6, Double = 7, Bool = 11, BFloat16 = 15, Undefined = -1
};
enum class DeviceType : int8_t { CPU = 0, CUDA = 1 };
enum class Layout : int8_t { Strided = 0 };
enum class MemoryFormat : int8_t { Contiguous = 0, Preserve = 1, ChannelsLast = 2, ChannelsLast3d = 3 };

#ifdef SANDBOX_LEAN_SHORT
#define SANDBOX_LEAN_SHORT_FLOATS(X) X(::c10::Half, Half) X(::c10::BFloat16, BFloat16)
#else
#define SANDBOX_LEAN_SHORT_FLOATS(X)
#endif
#define SANDBOX_LEAN_TYPES(X)                                                                                    \
  X(uint8_t, Byte) X(int8_t, Char) X(int16_t, Short) X(int, Int) X(int64_t, Long) X(float, Float) X(double, Double) \
  X(bool, Bool) SANDBOX_LEAN_SHORT_FLOATS(X)

template <typename T>
struct ScalarTypeOf;
template <ScalarType>
struct CppTypeOf;
#define SANDBOX_LEAN_TYPE(T, name)                                           \
  template <>                                                                \
  struct ScalarTypeOf<T> { static constexpr ScalarType value = ScalarType::name; }; \
  template <>                                                                \
  struct CppTypeOf<ScalarType::name> { using type = T; };
SANDBOX_LEAN_TYPES(SANDBOX_LEAN_TYPE)
#undef SANDBOX_LEAN_TYPE

inline const char* toString(ScalarType type) {
  switch (type) {
#define SANDBOX_LEAN_NAME(T, name) case ScalarType::name: return #name;
    SANDBOX_LEAN_TYPES(SANDBOX_LEAN_NAME)
#undef SANDBOX_LEAN_NAME
#ifndef SANDBOX_LEAN_SHORT
    case ScalarType::Half: return "Half";
    case ScalarType::BFloat16: return "BFloat16";
#endif
    default: return "Undefined";
  }
}
inline Stream& operator<<(Stream& out, ScalarType type) { return out << toString(type); }

inline constexpr ScalarType kByte = ScalarType::Byte, kUInt8 = ScalarType::Byte, kChar = ScalarType::Char, kInt8 = ScalarType::Char,
                            kShort = ScalarType::Short, kInt16 = ScalarType::Short, kInt = ScalarType::Int,
                            kInt32 = ScalarType::Int, kLong = ScalarType::Long, kInt64 = ScalarType::Long,
                            kHalf = ScalarType::Half, kFloat16 = ScalarType::Half, kFloat = ScalarType::Float,
                            kFloat32 = ScalarType::Float, kDouble = ScalarType::Double, kFloat64 = ScalarType::Double,
                            kBool = ScalarType::Bool, kBFloat16 = ScalarType::BFloat16;
inline constexpr DeviceType kCPU = DeviceType::CPU, kCUDA = DeviceType::CUDA;
inline constexpr Layout kStrided = Layout::Strided;

// What a tensor's dtype() is: compares with and turns into a ScalarType.
class TypeMeta {
 public:
  TypeMeta(ScalarType type = ScalarType::Undefined) : type_(type) {}
  ScalarType toScalarType() const { return type_; }
  operator ScalarType() const { return type_; }
  // As PyTorch writes it: the C++ type.
  const char* name() const {
    switch (type_) {
      case ScalarType::Byte: return "unsigned char";
      case ScalarType::Char: return "signed char";
      case ScalarType::Short: return "short int";
      case ScalarType::Int: return "int";
      case ScalarType::Long: return "long int";
      case ScalarType::Half: return "c10::Half";
      case ScalarType::Float: return "float";
      case ScalarType::Double: return "double";
      case ScalarType::Bool: return "bool";
      case ScalarType::BFloat16: return "c10::BFloat16";
      default: return "nullptr (uninitialized)";
    }
  }
  friend bool operator==(TypeMeta a, TypeMeta b) { return a.type_ == b.type_; }
  friend bool operator!=(TypeMeta a, TypeMeta b) { return a.type_ != b.type_; }
  friend bool operator==(TypeMeta a, ScalarType b) { return a.type_ == b; }
  friend bool operator!=(TypeMeta a, ScalarType b) { return a.type_ != b; }
  friend bool operator==(ScalarType a, TypeMeta b) { return a == b.type_; }
  friend bool operator!=(ScalarType a, TypeMeta b) { return a != b.type_; }
  friend Stream& operator<<(Stream& out, TypeMeta meta) { return out << meta.name(); }

 private:
  ScalarType type_;
};
inline ScalarType typeMetaToScalarType(TypeMeta meta) { return meta; }

using DeviceIndex = int8_t;
class Device {
 public:
  using Type = DeviceType;
  Device(DeviceType type, DeviceIndex index = -1) : type_(type), index_(index) {}
  Device(const char* text) : type_(text[0] == 'c' && text[1] == 'u' ? kCUDA : kCPU) {
    while (*text && *text != ':') ++text;
    if (!*text) return;
    int index = 0;
    while (*++text) index = 10 * index + (*text - '0');
    index_ = static_cast<DeviceIndex>(index);
  }
  DeviceType type() const { return type_; }
  DeviceIndex index() const { return index_; }
  bool has_index() const { return index_ != -1; }
  bool is_cuda() const { return type_ == kCUDA; }
  bool is_cpu() const { return type_ == kCPU; }
#ifndef SANDBOX_LEAN_LIGHT
  Device(const std::string& text) : Device(text.c_str()) {}
  std::string str() const {
    return std::string(is_cuda() ? "cuda" : "cpu") + (has_index() ? ":" + std::to_string(int(index_)) : "");
  }
#endif
  friend bool operator==(const Device& a, const Device& b) { return a.type_ == b.type_ && a.index_ == b.index_; }
  friend bool operator!=(const Device& a, const Device& b) { return !(a == b); }
  friend Stream& operator<<(Stream& out, const Device& device) {
    out << (device.is_cuda() ? "cuda" : "cpu");
    return device.has_index() ? out << ":" << int(device.index_) : out;
  }

 private:
  DeviceType type_;
  DeviceIndex index_ = -1;
};
inline Stream& operator<<(Stream& out, DeviceType type) { return out << (type == kCUDA ? "cuda" : "cpu"); }

template <typename T>
class ArrayRef {
 public:
  using value_type = T;
  using iterator = const T*;
  using const_iterator = const T*;
  ArrayRef() = default;
  ArrayRef(const T& one) : data_(&one), size_(1) {}
  ArrayRef(const T* data, size_t size) : data_(data), size_(size) {}
  ArrayRef(const T* begin, const T* end) : data_(begin), size_(static_cast<size_t>(end - begin)) {}
  ArrayRef(const std::vector<T>& values) : data_(values.data()), size_(values.size()) {}
  template <size_t N>
  ArrayRef(const std::array<T, N>& values) : data_(values.data()), size_(N) {}
  template <size_t N>
  ArrayRef(const T (&values)[N]) : data_(values), size_(N) {}
  ArrayRef(const std::initializer_list<T>& values)
      : data_(values.begin() == values.end() ? nullptr : values.begin()), size_(values.size()) {}
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }
  const T* data() const { return data_; }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  const T& operator[](size_t index) const { return data_[index]; }
  const T& front() const { return data_[0]; }
  const T& back() const { return data_[size_ - 1]; }
  const T& at(size_t index) const { return data_[index]; }
  ArrayRef<T> slice(size_t start, size_t length) const { return {data_ + start, length}; }
  ArrayRef<T> slice(size_t start) const { return {data_ + start, size_ - start}; }
  std::vector<T> vec() const { return {begin(), end()}; }
  bool equals(ArrayRef other) const {
    if (size_ != other.size_) return false;
    for (size_t index = 0; index < size_; ++index) {
      if (!(data_[index] == other.data_[index])) return false;
    }
    return true;
  }
  friend bool operator==(ArrayRef a, ArrayRef b) { return a.equals(b); }
  friend bool operator!=(ArrayRef a, ArrayRef b) { return !a.equals(b); }
  friend Stream& operator<<(Stream& out, ArrayRef values) {
    out << '[';
    for (size_t index = 0; index < values.size_; ++index) out << (index ? ", " : "") << values.data_[index];
    return out << ']';
  }

 private:
  const T* data_ = nullptr;
  size_t size_ = 0;
};
using IntArrayRef = ArrayRef<int64_t>;

class TensorOptions {
 public:
  TensorOptions() = default;
  TensorOptions(ScalarType type) { said.dtype = static_cast<int8_t>(type); }
  TensorOptions(TypeMeta meta) : TensorOptions(meta.toScalarType()) {}
  TensorOptions(Device on) : TensorOptions(TensorOptions().device(on)) {}
  TensorOptions(DeviceType on) : TensorOptions(Device(on)) {}
  TensorOptions dtype(ScalarType type) const { return with([&](auto& s) { s.dtype = static_cast<int8_t>(type); }); }
  TensorOptions dtype(TypeMeta meta) const { return dtype(meta.toScalarType()); }
  TensorOptions device(Device on) const {
    return with([&](auto& s) { s.device_type = static_cast<int8_t>(on.type()), s.device_index = on.index(); });
  }
  TensorOptions device(DeviceType type, DeviceIndex index) const { return device(Device(type, index)); }
  TensorOptions device_index(DeviceIndex index) const { return device(Device(kCUDA, index)); }
  TensorOptions layout(Layout) const { return *this; }
  TensorOptions memory_format(MemoryFormat format) const {
    return with([&](auto& s) { s.memory_format = static_cast<int8_t>(format); });
  }
  TensorOptions requires_grad(bool wanted) const { return with([&](auto& s) { s.requires_grad = wanted; }); }
  TensorOptions pinned_memory(bool wanted) const { return with([&](auto& s) { s.pinned = wanted; }); }
  TypeMeta dtype() const { return said.dtype < 0 ? kFloat : static_cast<ScalarType>(said.dtype); }
  Device device() const {
    return {said.device_type < 0 ? kCPU : static_cast<DeviceType>(said.device_type), said.device_index};
  }
  SandboxLeanOptions said;

 private:
  template <typename F>
  TensorOptions with(F change) const {
    TensorOptions changed = *this;
    change(changed.said);
    return changed;
  }
};
inline TensorOptions dtype(ScalarType type) { return TensorOptions(type); }
inline TensorOptions dtype(TypeMeta meta) { return TensorOptions(meta); }
inline TensorOptions device(Device on) { return TensorOptions(on); }
inline TensorOptions requires_grad(bool wanted = true) { return TensorOptions().requires_grad(wanted); }

// What x.type() says of a tensor. PyTorch's dispatch macros no longer take it (dispatch.h).
class DeprecatedTypeProperties {
 public:
  DeprecatedTypeProperties(ScalarType type, DeviceType on) : type_(type), on_(on) {}
  ScalarType scalarType() const { return type_; }
  TypeMeta typeMeta() const { return type_; }
  DeviceType device_type() const { return on_; }
  Layout layout() const { return kStrided; }
  bool is_cuda() const { return on_ == kCUDA; }
  bool is_sparse() const { return false; }
  TensorOptions options(int16_t device_index = -1) const {
    return TensorOptions(type_).device(on_, static_cast<DeviceIndex>(device_index));
  }
  operator TensorOptions() const { return options(); }
  friend bool operator==(const DeprecatedTypeProperties& a, const DeprecatedTypeProperties& b) {
    return a.type_ == b.type_ && a.on_ == b.on_;
  }
  friend bool operator!=(const DeprecatedTypeProperties& a, const DeprecatedTypeProperties& b) { return !(a == b); }

 private:
  ScalarType type_;
  DeviceType on_;
};

// A number of either kind.
class Scalar {
 public:
  template <typename T, typename = std::enable_if_t<std::is_arithmetic_v<T>>>
  Scalar(T value)
      : number_(static_cast<double>(value)),
        integer_(static_cast<int64_t>(value)),
        integral_(std::is_integral_v<T>),
        boolean_(std::is_same_v<T, bool>) {}
  template <typename T>
  T to() const { return integral_ ? static_cast<T>(integer_) : static_cast<T>(number_); }
  double toDouble() const { return to<double>(); }
  float toFloat() const { return to<float>(); }
  int64_t toLong() const { return to<int64_t>(); }
  int toInt() const { return to<int>(); }
  bool toBool() const { return to<bool>(); }
  bool isIntegral() const { return integral_; }
  bool isBoolean() const { return boolean_; }
  SandboxLeanScalar said() const { return {number_, integer_, static_cast<int8_t>(boolean_ ? 3 : integral_ ? 2 : 1)}; }
  static SandboxLeanScalar said(const optional<Scalar>& value) { return value ? value->said() : SandboxLeanScalar(); }

 private:
  double number_;
  int64_t integer_;
  bool integral_, boolean_;
};

#ifdef SANDBOX_LEAN_LIGHT
template <typename... A>
Text str(const A&... parts) {
  Text text;
  (void)(text << ... << parts);
  return text;
}
#else
template <typename... A>
std::string str(const A&... parts) {
  if constexpr (sizeof...(A) == 0) {
    return "";
  } else {
    std::ostringstream text;
    (text << ... << parts);
    return text.str();
  }
}
#endif

}  // namespace sandbox_lean

#define SANDBOX_LEAN_THROW(kind, message) \
  ::sandbox_lean_fail(kind, __func__, __FILE__, static_cast<uint32_t>(__LINE__), (message).c_str())
#define SANDBOX_LEAN_FAIL(...) SANDBOX_LEAN_THROW(0, ::sandbox_lean::str(__VA_ARGS__))
#define SANDBOX_LEAN_FALSE(condition, ...)                                                                               \
  (sizeof(#__VA_ARGS__) > 1 ? ::sandbox_lean::str(__VA_ARGS__)                                                           \
                            : ::sandbox_lean::str("Expected " condition                                                 \
                                          " to be true, but got false.  (Could this error message be improved?  If so, " \
                                          "please report an enhancement request to PyTorch.)"))
#define SANDBOX_LEAN_CHECK(kind, condition, ...)                                                             \
  do {                                                                                                       \
    if (!(condition)) SANDBOX_LEAN_THROW(kind, SANDBOX_LEAN_FALSE(#condition, ##__VA_ARGS__));               \
  } while (false)
#define TORCH_CHECK(condition, ...) SANDBOX_LEAN_CHECK(0, condition, ##__VA_ARGS__)
#define TORCH_CHECK_INDEX(condition, ...) SANDBOX_LEAN_CHECK(1, condition, ##__VA_ARGS__)
#define TORCH_CHECK_VALUE(condition, ...) SANDBOX_LEAN_CHECK(2, condition, ##__VA_ARGS__)
#define TORCH_CHECK_TYPE(condition, ...) SANDBOX_LEAN_CHECK(3, condition, ##__VA_ARGS__)
#define TORCH_CHECK_NOT_IMPLEMENTED(condition, ...) SANDBOX_LEAN_CHECK(4, condition, ##__VA_ARGS__)
#define TORCH_INTERNAL_ASSERT(condition, ...) TORCH_CHECK(condition, ##__VA_ARGS__)
#define AT_ASSERT(condition) TORCH_CHECK(condition)
#define AT_ASSERTM(condition, ...) TORCH_CHECK(condition, ##__VA_ARGS__)
#define AT_ERROR(...) SANDBOX_LEAN_FAIL(__VA_ARGS__)
#define TORCH_WARN(...) ::sandbox_lean_warn(::sandbox_lean::str(__VA_ARGS__).c_str())
