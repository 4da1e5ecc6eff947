// AT_DISPATCH_*: a switch over a tensor's element type whose branches know it as `scalar_t`.
#pragma once

#include "base.h"

namespace sandbox_lean {
inline ScalarType scalar_type(ScalarType type) { return type; }
inline ScalarType scalar_type(TypeMeta meta) { return meta.toScalarType(); }
template <typename T, typename = std::enable_if_t<std::is_same_v<T, DeprecatedTypeProperties>>>
ScalarType scalar_type(const T& type) {
  static_assert(sizeof(T) == 0, "PyTorch's dispatch macros take x.scalar_type(), not x.type()");
  return type.scalarType();
}

// What a kernel computes in (opmath_type) and adds up in (acc_type; the second argument: on a GPU) for elements of a type.
template <typename T>
struct OpMathType { using type = T; };
template <typename T, bool on_gpu>
struct AccumulateType { using type = std::conditional_t<std::is_integral_v<T> && !std::is_same_v<T, bool>, int64_t, T>; };
template <>
struct AccumulateType<float, false> { using type = double; };
#define SANDBOX_LEAN_IN_FLOAT(T, name)                            \
  template <>                                                     \
  struct OpMathType<T> { using type = float; };                   \
  template <bool on_gpu>                                          \
  struct AccumulateType<T, on_gpu> { using type = float; };
SANDBOX_LEAN_SHORT_FLOATS(SANDBOX_LEAN_IN_FLOAT)
#undef SANDBOX_LEAN_IN_FLOAT
template <typename T>
using opmath_type = typename OpMathType<T>::type;
template <typename T, bool on_gpu>
using acc_type = typename AccumulateType<T, on_gpu>::type;
}  // namespace sandbox_lean

#define AT_DISPATCH_SWITCH(TYPE, NAME, ...)                                                            \
  [&] {                                                                                                \
    const ::sandbox_lean::ScalarType sandbox_type = ::sandbox_lean::scalar_type(TYPE);                 \
    switch (sandbox_type) {                                                                            \
      __VA_ARGS__                                                                                      \
      default:                                                                                         \
        SANDBOX_LEAN_THROW(4, ::sandbox_lean::str('"', NAME, "\" not implemented for '", sandbox_type, "'")); \
    }                                                                                                  \
  }()
#define AT_DISPATCH_CASE(TYPE, ...)                                             \
  case TYPE: {                                                                  \
    using scalar_t [[maybe_unused]] = typename ::sandbox_lean::CppTypeOf<TYPE>::type; \
    return __VA_ARGS__();                                                       \
  }
#define SANDBOX_LEAN_CASE(name, ...) AT_DISPATCH_CASE(::sandbox_lean::ScalarType::name, __VA_ARGS__)
#define SANDBOX_LEAN_FLOATING(...) SANDBOX_LEAN_CASE(Double, __VA_ARGS__) SANDBOX_LEAN_CASE(Float, __VA_ARGS__)
#define SANDBOX_LEAN_INTEGRAL(...)                                                                                   \
  SANDBOX_LEAN_CASE(Byte, __VA_ARGS__) SANDBOX_LEAN_CASE(Char, __VA_ARGS__) SANDBOX_LEAN_CASE(Int, __VA_ARGS__)      \
  SANDBOX_LEAN_CASE(Long, __VA_ARGS__) SANDBOX_LEAN_CASE(Short, __VA_ARGS__)
#define SANDBOX_LEAN_ALL(...) SANDBOX_LEAN_INTEGRAL(__VA_ARGS__) SANDBOX_LEAN_FLOATING(__VA_ARGS__)

#define AT_DISPATCH_CASE_FLOATING_TYPES(...) SANDBOX_LEAN_FLOATING(__VA_ARGS__)
#define AT_DISPATCH_CASE_FLOATING_TYPES_AND_HALF(...) SANDBOX_LEAN_FLOATING(__VA_ARGS__) SANDBOX_LEAN_CASE(Half, __VA_ARGS__)
#define AT_DISPATCH_CASE_INTEGRAL_TYPES(...) SANDBOX_LEAN_INTEGRAL(__VA_ARGS__)
#define AT_DISPATCH_CASE_ALL_TYPES(...) SANDBOX_LEAN_ALL(__VA_ARGS__)

#define AT_DISPATCH_FLOATING_TYPES(TYPE, NAME, ...) AT_DISPATCH_SWITCH(TYPE, NAME, SANDBOX_LEAN_FLOATING(__VA_ARGS__))
#define AT_DISPATCH_FLOATING_TYPES_AND_HALF(TYPE, NAME, ...) \
  AT_DISPATCH_SWITCH(TYPE, NAME, AT_DISPATCH_CASE_FLOATING_TYPES_AND_HALF(__VA_ARGS__))
#define AT_DISPATCH_FLOATING_TYPES_AND(A, TYPE, NAME, ...) \
  AT_DISPATCH_SWITCH(TYPE, NAME, SANDBOX_LEAN_FLOATING(__VA_ARGS__) AT_DISPATCH_CASE(A, __VA_ARGS__))
#define AT_DISPATCH_FLOATING_TYPES_AND2(A, B, TYPE, NAME, ...) \
  AT_DISPATCH_SWITCH(TYPE, NAME, SANDBOX_LEAN_FLOATING(__VA_ARGS__) AT_DISPATCH_CASE(A, __VA_ARGS__) AT_DISPATCH_CASE(B, __VA_ARGS__))
#define AT_DISPATCH_REDUCED_FLOATING_TYPES(TYPE, NAME, ...) \
  AT_DISPATCH_SWITCH(TYPE, NAME, SANDBOX_LEAN_CASE(Half, __VA_ARGS__) SANDBOX_LEAN_CASE(BFloat16, __VA_ARGS__))
#define AT_DISPATCH_INTEGRAL_TYPES(TYPE, NAME, ...) AT_DISPATCH_SWITCH(TYPE, NAME, SANDBOX_LEAN_INTEGRAL(__VA_ARGS__))
#define AT_DISPATCH_INDEX_TYPES(TYPE, NAME, ...)                                                                        \
  AT_DISPATCH_SWITCH(TYPE, NAME, SANDBOX_LEAN_INDEX(Int, __VA_ARGS__) SANDBOX_LEAN_INDEX(Long, __VA_ARGS__))
#define SANDBOX_LEAN_INDEX(name, ...)                                                                     \
  case ::sandbox_lean::ScalarType::name: {                                                                \
    using index_t [[maybe_unused]] = typename ::sandbox_lean::CppTypeOf<::sandbox_lean::ScalarType::name>::type; \
    return __VA_ARGS__();                                                                                 \
  }
#define AT_DISPATCH_ALL_TYPES(TYPE, NAME, ...) AT_DISPATCH_SWITCH(TYPE, NAME, SANDBOX_LEAN_ALL(__VA_ARGS__))
#define AT_DISPATCH_ALL_TYPES_AND(A, TYPE, NAME, ...) \
  AT_DISPATCH_SWITCH(TYPE, NAME, SANDBOX_LEAN_ALL(__VA_ARGS__) AT_DISPATCH_CASE(A, __VA_ARGS__))
#define AT_DISPATCH_ALL_TYPES_AND2(A, B, TYPE, NAME, ...) \
  AT_DISPATCH_SWITCH(TYPE, NAME, SANDBOX_LEAN_ALL(__VA_ARGS__) AT_DISPATCH_CASE(A, __VA_ARGS__) AT_DISPATCH_CASE(B, __VA_ARGS__))
#define AT_DISPATCH_ALL_TYPES_AND3(A, B, C, TYPE, NAME, ...)                                                            \
  AT_DISPATCH_SWITCH(TYPE, NAME, SANDBOX_LEAN_ALL(__VA_ARGS__) AT_DISPATCH_CASE(A, __VA_ARGS__) AT_DISPATCH_CASE(B, __VA_ARGS__) \
                                     AT_DISPATCH_CASE(C, __VA_ARGS__))
