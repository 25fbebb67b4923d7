#include "bindings/item_fields_type.h"

#include <structmember.h>

#include <array>
#include <cstddef>
#include <type_traits>

namespace py = pybind11;

namespace pipedream {

namespace {

struct PyItemFields {
  PyObject ob_base;  // PyObject_HEAD
  ItemFields fields;
};

// Python makes the object from zeroed memory, and frees it without a destructor.
static_assert(std::is_trivially_copyable_v<ItemFields> && sizeof(bool) == sizeof(char));

constexpr PyMemberDef member(const char* name, int type, std::size_t in_fields) {
  return {name, type, static_cast<Py_ssize_t>(offsetof(PyItemFields, fields) + in_fields), 0, nullptr};
}

std::array<PyMemberDef, 8> g_members{{
    member("data_fingerprint", T_ULONGLONG, offsetof(ItemFields, data_fingerprint)),
    member("loss_scale", T_DOUBLE, offsetof(ItemFields, loss_scale)),
    member("gradients_overflowed", T_BOOL, offsetof(ItemFields, gradients_overflowed)),
    member("is_empty", T_BOOL, offsetof(ItemFields, is_empty)),
    member("num_minibatches", T_UINT, offsetof(ItemFields, num_minibatches)),
    member("is_end_of_data", T_BOOL, offsetof(ItemFields, is_end_of_data)),
    member("boundary_events", T_UBYTE, offsetof(ItemFields, boundary_events)),
    {},
}};

PyTypeObject* g_type = nullptr;  // set once, when the module is imported

// Accepts keyword arguments only. Each sets the member with the same name.
int init(PyObject* self, PyObject* arguments, PyObject* keywords) {
  if (PyTuple_GET_SIZE(arguments) != 0) {
    PyErr_SetString(PyExc_TypeError, "ItemFields() takes keywords alone");
    return -1;
  }
  PyObject* name = nullptr;
  PyObject* value = nullptr;
  for (Py_ssize_t position = 0;
       keywords != nullptr && PyDict_Next(keywords, &position, &name, &value) != 0;) {
    if (PyObject_SetAttr(self, name, value) != 0) return -1;
  }
  return 0;
}

void deallocate(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

}  // namespace

ItemFields* item_fields_in(py::handle object) {
  if (Py_TYPE(object.ptr()) != g_type) return nullptr;
  return &reinterpret_cast<PyItemFields*>(object.ptr())->fields;  // NOLINT(*-reinterpret-cast)
}

py::object make_item_fields(const ItemFields& fields) {
  auto made = py::reinterpret_steal<py::object>(PyType_GenericNew(g_type, nullptr, nullptr));
  if (!made) throw py::error_already_set();
  *item_fields_in(made) = fields;
  return made;
}

void bind_item_fields(py::module_& module) {
  std::array<PyType_Slot, 5> slots{{
      {Py_tp_members, g_members.data()},
      {Py_tp_new, reinterpret_cast<void*>(PyType_GenericNew)},  // NOLINT(*-reinterpret-cast)
      {Py_tp_init, reinterpret_cast<void*>(init)},              // NOLINT(*-reinterpret-cast)
      {Py_tp_dealloc, reinterpret_cast<void*>(deallocate)},     // NOLINT(*-reinterpret-cast)
      {0, nullptr},
  }};
  PyType_Spec spec{"pipedream._core.ItemFields", sizeof(PyItemFields), 0, Py_TPFLAGS_DEFAULT, slots.data()};
  g_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));  // NOLINT(*-reinterpret-cast)
  if (g_type == nullptr) throw py::error_already_set();
  module.attr("ItemFields") = py::handle(reinterpret_cast<PyObject*>(g_type));  // NOLINT(*-reinterpret-cast)
}

}  // namespace pipedream
