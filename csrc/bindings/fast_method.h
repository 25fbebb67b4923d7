// Binds methods that are called for every work item, with Python's own calling convention (METH_FASTCALL),
// which passes a pointer to the arguments. pybind11 would pack the arguments into a tuple, look for an
// overload and cast each argument by its type. That runs several times as much code, which would no longer be
// in the processor's caches at the next work item. Called with the GIL held.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <exception>
#include <span>
#include <string>

#include "base/failure.h"

namespace pipedream {

using FastArguments = std::span<PyObject* const>;  // borrowed references; def_fast() has checked the number

// Runs a call and returns its result; if it throws, sets Python's error and returns null.
template <class Call>
[[nodiscard]] PyObject* python_result(Call call) noexcept try {
  return call().release().ptr();
} catch (pybind11::error_already_set& error) {
  error.restore();
  return nullptr;
} catch (pybind11::builtin_exception& error) {
  error.set_error();
  return nullptr;
} catch (const UserError& error) {
  PyErr_SetString(PyExc_ValueError, error.what());
  return nullptr;
} catch (const std::exception& error) {
  PyErr_SetString(PyExc_RuntimeError, error.what());
  return nullptr;
}

[[nodiscard]] inline pybind11::list list_in(PyObject* argument) {
  if (PyList_Check(argument) == 0) throw pybind11::type_error("a list is wanted");
  return pybind11::reinterpret_borrow<pybind11::list>(argument);
}

// Binds `method`, a function (Self&, FastArguments) -> object. name: a literal, because it is not copied.
template <class Self, auto method, std::size_t kNumArguments>
void def_fast(const pybind11::object& bound_class, const char* name) {
  static const char* const called = name;
  constexpr auto call = [](PyObject* self, PyObject* const* arguments,
                           Py_ssize_t num_arguments) -> PyObject* {
    if (static_cast<std::size_t>(num_arguments) != kNumArguments) {
      return PyErr_Format(PyExc_TypeError, "%s() takes %zu arguments, %zd were given", called, kNumArguments,
                          num_arguments);
    }
    return python_result([&]() -> pybind11::object {
      return method(pybind11::cast<Self&>(pybind11::handle(self)), FastArguments(arguments, kNumArguments));
    });
  };
  // Python stores functions of every convention as a PyCFunction.
  PyObject* (*const function)(PyObject*, PyObject* const*, Py_ssize_t) = call;
  // NOLINTNEXTLINE(*-reinterpret-cast)
  const auto stored = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
  static PyMethodDef definition{name, stored, METH_FASTCALL, nullptr};
  // NOLINTNEXTLINE(*-reinterpret-cast)
  auto* const type = reinterpret_cast<PyTypeObject*>(bound_class.ptr());
  const auto made = pybind11::reinterpret_steal<pybind11::object>(PyDescr_NewMethod(type, &definition));
  if (!made) throw pybind11::error_already_set();
  bound_class.attr(name) = made;
}

}  // namespace pipedream
