// Binds C++ functions to Python over the C API: what `load_inline` does with pybind11, at a tenth of its
// compile time. A function's argument and result types choose the conversions; a type that has none here
// stops the compiler with "no fast binding", and the build takes the plain road (sandbox/build/roads.py).
//
// Conversions accept what pybind11's accept when it converts implicitly. Exceptions become Python's by
// PyTorch's own translation. The GIL is held throughout, as under `torch::wrap_pybind_function`.
#pragma once

#include <Python.h>

#include <array>
#include <cstdint>
#include <exception>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/types.h>

#ifndef SANDBOX_LEAN
// Exported by libtorch_python; declared here because their header brings pybind11 along.
extern PyObject* THPVariableClass;
PyObject* THPVariable_Wrap(const at::TensorBase& tensor);
namespace torch {
void translate_exception_to_python(const std::exception_ptr& error);
}
#endif

namespace sandbox_binding {

#ifndef SANDBOX_LEAN
// Layout of torch.Tensor up to its payload. toolchain.py compares it with PyTorch's own declaration.
struct TensorObject {
  PyObject_HEAD
  at::Tensor cdata;
};
#endif

// Thrown after a Python error has been set.
struct PythonErrorSet {};

template <typename T>
inline constexpr bool never = false;

template <typename T, typename = void>
struct Convert {
  static_assert(never<T>, "no fast binding for this type");
};

// Each conversion has `T value`, `bool load(PyObject*)` (false: wrong type, no error set), `PyObject*
// cast(T)` (a new reference, or null with an error set) where the type can be returned, and `expected`, a
// name for messages.

template <>
struct Convert<at::Tensor> {
  static constexpr const char* expected = "a Tensor";
  at::Tensor value;
#ifdef SANDBOX_LEAN
  bool load(PyObject* object) {
    const bool is_tensor = sandbox_lean_is_tensor(object);
    if (PyErr_Occurred()) throw PythonErrorSet();
    if (is_tensor) value = at::Tensor::of(sandbox_lean_from_python(object));
    return is_tensor;
  }
  static PyObject* cast(const at::Tensor& tensor) { return static_cast<PyObject*>(sandbox_lean_to_python(tensor.unsafe())); }
#else
  bool load(PyObject* object) {
    const int is_tensor = PyObject_IsInstance(object, THPVariableClass);
    if (is_tensor < 0) throw PythonErrorSet();
    if (is_tensor) value = reinterpret_cast<TensorObject*>(object)->cdata;
    return is_tensor;
  }
  static PyObject* cast(const at::Tensor& tensor) { return THPVariable_Wrap(tensor); }
#endif
};

template <>
struct Convert<bool> {
  static constexpr const char* expected = "a bool";
  bool value = false;
  bool load(PyObject* object) {
    const int truth = object == Py_None ? 0
        : Py_TYPE(object)->tp_as_number && Py_TYPE(object)->tp_as_number->nb_bool ? PyObject_IsTrue(object)
                                                                                 : -1;
    if (truth < 0) PyErr_Clear();
    value = truth == 1;
    return truth >= 0;
  }
  static PyObject* cast(bool value) { return PyBool_FromLong(value); }
};

template <typename T>
struct Convert<T, std::enable_if_t<std::is_integral_v<T> && !std::is_same_v<T, bool> && (sizeof(T) > 1)>> {
  static constexpr const char* expected = "an int";
  T value = 0;
  bool load(PyObject* object) {
    if (PyFloat_Check(object)) return false;
    PyObject* number = PyIndex_Check(object) ? PyNumber_Index(object)
        : PyNumber_Check(object)             ? PyNumber_Long(object)
                                             : nullptr;
    if (number == nullptr) {
      PyErr_Clear();
      return false;
    }
    bool fits;
    if constexpr (std::is_signed_v<T>) {
      const long long wide = PyLong_AsLongLong(number);
      fits = wide >= std::numeric_limits<T>::min() && wide <= std::numeric_limits<T>::max();
      value = static_cast<T>(wide);
    } else {
      const unsigned long long wide = PyLong_AsUnsignedLongLong(number);
      fits = wide <= std::numeric_limits<T>::max();
      value = static_cast<T>(wide);
    }
    Py_DECREF(number);
    if (PyErr_Occurred()) {
      PyErr_Clear();
      return false;
    }
    return fits;
  }
  static PyObject* cast(T value) {
    if constexpr (std::is_signed_v<T>) return PyLong_FromLongLong(value);
    else return PyLong_FromUnsignedLongLong(value);
  }
};

template <typename T>
struct Convert<T, std::enable_if_t<std::is_floating_point_v<T>>> {
  static constexpr const char* expected = "a float";
  T value = 0;
  bool load(PyObject* object) {
    double wide = PyFloat_AsDouble(object);
    if (wide == -1.0 && PyErr_Occurred()) {
      PyErr_Clear();
      PyObject* number = PyNumber_Check(object) ? PyNumber_Float(object) : nullptr;
      if (number == nullptr) {
        PyErr_Clear();
        return false;
      }
      wide = PyFloat_AS_DOUBLE(number);
      Py_DECREF(number);
    }
    value = static_cast<T>(wide);
    return true;
  }
  static PyObject* cast(T value) { return PyFloat_FromDouble(value); }
};

template <>
struct Convert<std::string> {
  static constexpr const char* expected = "a str";
  std::string value;
  bool load(PyObject* object) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_Check(object) ? PyUnicode_AsUTF8AndSize(object, &size) : nullptr;
    if (text == nullptr && PyBytes_Check(object)) {
      text = PyBytes_AS_STRING(object);
      size = PyBytes_GET_SIZE(object);
    }
    if (text == nullptr) {
      PyErr_Clear();
      return false;
    }
    value.assign(text, static_cast<size_t>(size));
    return true;
  }
  static PyObject* cast(const std::string& text) {
    return PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size()));
  }
};

template <typename T>
struct Convert<std::optional<T>> {
  static constexpr const char* expected = Convert<T>::expected;
  std::optional<T> value;
  bool load(PyObject* object) {
    value.reset();
    if (object == Py_None) return true;
    Convert<T> inner;
    if (!inner.load(object)) return false;
    value.emplace(std::move(inner.value));
    return true;
  }
  static PyObject* cast(const std::optional<T>& value) {
    if (!value) Py_RETURN_NONE;
    return Convert<T>::cast(*value);
  }
};

template <typename T>
struct Convert<std::vector<T>> {
  static constexpr const char* expected = "a list of the right type";
  std::vector<T> value;
  bool load(PyObject* object) {
    if (!PySequence_Check(object) || PyUnicode_Check(object) || PyBytes_Check(object)) return false;
    const Py_ssize_t size = PySequence_Size(object);
    if (size < 0) throw PythonErrorSet();
    value.clear();
    value.reserve(static_cast<size_t>(size));
    for (Py_ssize_t index = 0; index < size; ++index) {
      PyObject* item = PySequence_GetItem(object, index);
      if (item == nullptr) throw PythonErrorSet();
      Convert<T> inner;
      bool loaded = false;
      try {
        loaded = inner.load(item);
      } catch (...) {
        Py_DECREF(item);
        throw;
      }
      Py_DECREF(item);
      if (!loaded) return false;
      value.push_back(std::move(inner.value));
    }
    return true;
  }
  static PyObject* cast(const std::vector<T>& values) {
    PyObject* list = PyList_New(static_cast<Py_ssize_t>(values.size()));
    if (list == nullptr) return nullptr;
    for (size_t index = 0; index < values.size(); ++index) {
      PyObject* item = Convert<T>::cast(values[index]);
      if (item == nullptr) {
        Py_DECREF(list);
        return nullptr;
      }
      PyList_SET_ITEM(list, static_cast<Py_ssize_t>(index), item);
    }
    return list;
  }
};

// A view of integers: the numbers live in `held` while the function runs.
template <>
struct Convert<at::IntArrayRef> {
  static constexpr const char* expected = "a list of ints";
  Convert<std::vector<int64_t>> held;
  at::IntArrayRef value;
  bool load(PyObject* object) {
    if (!held.load(object)) return false;
    value = held.value;
    return true;
  }
};

template <typename Tuple, size_t... I>
PyObject* cast_tuple(const Tuple& values, std::index_sequence<I...>) {
  PyObject* items[] = {Convert<std::decay_t<std::tuple_element_t<I, Tuple>>>::cast(std::get<I>(values))...};
  PyObject* tuple = PyTuple_New(sizeof...(I));
  bool whole = tuple != nullptr;
  for (PyObject* item : items) whole = whole && item != nullptr;
  if (!whole) {
    for (PyObject* item : items) Py_XDECREF(item);
    Py_XDECREF(tuple);
    return nullptr;
  }
  ((PyTuple_SET_ITEM(tuple, I, items[I])), ...);
  return tuple;
}

template <typename... T>
struct Convert<std::tuple<T...>, std::enable_if_t<(sizeof...(T) > 0)>> {
  static PyObject* cast(const std::tuple<T...>& values) {
    return cast_tuple(values, std::index_sequence_for<T...>());
  }
};

template <typename A, typename B>
struct Convert<std::pair<A, B>> {
  static PyObject* cast(const std::pair<A, B>& values) {
    return cast_tuple(values, std::index_sequence<0, 1>());
  }
};

inline void load_failed(const char* name, size_t index, const char* expected, PyObject* got) {
  PyErr_Format(PyExc_TypeError, "%s(): incompatible function arguments: argument %zu must be %s, not %s", name,
               index + 1, expected, Py_TYPE(got)->tp_name);
}

template <typename R, typename... A, size_t... I>
PyObject* invoke(R (*function)(A...), const char* name, PyObject* const* arguments, std::index_sequence<I...>) {
  std::tuple<Convert<std::decay_t<A>>...> loaded;
  const bool fits = ([&] {
    if (std::get<I>(loaded).load(arguments[I])) return true;
    load_failed(name, I, Convert<std::decay_t<A>>::expected, arguments[I]);
    return false;
  }() && ...);
  if (!fits) return nullptr;
  if constexpr (std::is_void_v<R>) {
    function(std::forward<A>(std::get<I>(loaded).value)...);
    Py_RETURN_NONE;
  } else {
    return Convert<std::decay_t<R>>::cast(function(std::forward<A>(std::get<I>(loaded).value)...));
  }
}

// Makes the exception being handled a Python error.
inline void translate_as_pytorch() {
#ifdef SANDBOX_LEAN
  sandbox_lean_translate_exception();
#else
  torch::translate_exception_to_python(std::current_exception());
#endif
}

template <auto translate = translate_as_pytorch, typename R, typename... A>
PyObject* enter(R (*function)(A...), const char* name, PyObject* const* arguments, Py_ssize_t count) {
  if (count != static_cast<Py_ssize_t>(sizeof...(A))) {
    return PyErr_Format(PyExc_TypeError, "%s(): incompatible function arguments: it takes %zu, %zd were given",
                        name, sizeof...(A), count);
  }
  try {
    return invoke(function, name, arguments, std::index_sequence_for<A...>());
  } catch (const PythonErrorSet&) {
    return nullptr;
  } catch (...) {
    translate();
    return nullptr;
  }
}

#ifdef SANDBOX_LEAN
// What the body of a PYBIND11_MODULE has in its hands: the part of pybind11's module that binds functions by position, each under a
// name of its own. Exceptions become Python's as pybind11 makes them. The rest of pybind11 does not compile, and takes the plain road.
class Module {
 public:
  explicit Module(PyObject* module) : module_(module) {}

  // `function`: a function, its address, or a lambda without captures.
  template <typename F>
  Module& def(const char* name, const F& function, const char* doc = "") {
    bind(name, doc, +function);
    return *this;
  }

  // To be assigned to.
  class Doc {
   public:
    explicit Doc(PyObject* module) : module_(module) {}
    void operator=(const char* text) const {
      if (PyModule_SetDocString(module_, text) < 0) throw PythonErrorSet();
    }

   private:
    PyObject* module_;
  };
  Doc doc() const { return Doc(module_); }

 private:
  template <typename R, typename... A>
  struct Bound {
    std::string name, doc;
    R (*function)(A...);
    PyMethodDef method;
  };
  using Call = PyObject* (*)(PyObject* self, PyObject* const* arguments, Py_ssize_t count, PyObject* keywords);

  // A function of the module whose `self` holds what it calls; it lives as long as the process, as a loaded library does.
  template <typename R, typename... A>
  void bind(const char* name, const char* doc, R (*function)(A...)) {
    auto* bound = new Bound<R, A...>{name, doc ? doc : "", function, {}};
    Call call = [](PyObject* self, PyObject* const* arguments, Py_ssize_t count, PyObject* keywords) -> PyObject* {
      const auto* of = static_cast<const Bound<R, A...>*>(PyCapsule_GetPointer(self, nullptr));
      if (keywords && PyTuple_GET_SIZE(keywords)) {
        return PyErr_Format(PyExc_TypeError, "%s(): incompatible function arguments: they are given by position", of->name.c_str());
      }
      return enter<sandbox_lean_translate_as_pybind>(of->function, of->name.c_str(), arguments, count);
    };
    bound->method = {bound->name.c_str(), reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)),
                     METH_FASTCALL | METH_KEYWORDS, bound->doc.c_str()};
    PyObject* self = PyCapsule_New(bound, nullptr, nullptr);
    PyObject* made = self ? PyCFunction_NewEx(&bound->method, self, nullptr) : nullptr;
    Py_XDECREF(self);
    if (!made || PyModule_AddObject(module_, bound->name.c_str(), made) < 0) {
      Py_XDECREF(made);
      throw PythonErrorSet();
    }
  }

  PyObject* module_;
};

inline PyObject* made_module(PyModuleDef* definition, void (*body)(Module&)) {
  PyObject* object = PyModule_Create(definition);
  if (object == nullptr) return nullptr;
  try {
    Module module(object);
    body(module);
    return object;
  } catch (const PythonErrorSet&) {
  } catch (...) {
    sandbox_lean_translate_as_pybind();
  }
  Py_DECREF(object);
  return nullptr;
}
#endif

}  // namespace sandbox_binding

#ifdef SANDBOX_LEAN
#define PYBIND11_MODULE(name, variable) SANDBOX_MODULE(name, variable)
#define SANDBOX_MODULE(name, variable)                                                                       \
  static void sandbox_body_##name(sandbox_binding::Module&);                                                 \
  PyMODINIT_FUNC PyInit_##name() {                                                                           \
    static PyModuleDef definition = {PyModuleDef_HEAD_INIT, #name, nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr}; \
    return sandbox_binding::made_module(&definition, sandbox_body_##name);                                   \
  }                                                                                                          \
  static void sandbox_body_##name(sandbox_binding::Module& variable)
#endif

// One entry of a PyMethodDef table. The last argument may contain commas (template arguments).
#define SANDBOX_METHOD(name, doc, ...)                                                               \
  {name,                                                                                             \
   reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(+[](PyObject*, PyObject* const* arguments, \
                                                                  Py_ssize_t count) -> PyObject* {   \
     return sandbox_binding::enter(&__VA_ARGS__, name, arguments, count);                            \
   })),                                                                                              \
   METH_FASTCALL, doc}
