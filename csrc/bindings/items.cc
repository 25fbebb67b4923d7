#include "bindings/items.h"

#include <pybind11/stl.h>
#include <structmember.h>

#include <array>
#include <cstddef>
#include <utility>

#include "base/check.h"
#include "bindings/fast_method.h"
#include "bindings/item_fields_type.h"
#include "bindings/tensor_exchange.h"

namespace py = pybind11;

namespace pipedream {

namespace {

struct PyWorkItem {
  PyObject ob_base;  // PyObject_HEAD
  PyObject* kind;
  PyObject* edge;
  PyObject* tensors;
  std::int64_t stage;
  std::int64_t minibatch;
  std::int64_t microbatch;
  std::int64_t read_slot;
  std::int64_t write_slot;
  std::int64_t freed_slot;
  std::int64_t num_minibatches;
  ItemFields fields;
};
static_assert(sizeof(std::int64_t) == sizeof(long long) && sizeof(bool) == sizeof(char));

constexpr PyMemberDef object_member(const char* name, std::size_t offset) {
  return {name, T_OBJECT, static_cast<Py_ssize_t>(offset), READONLY, nullptr};
}

constexpr PyMemberDef number_member(const char* name, std::size_t offset) {
  return {name, T_LONGLONG, static_cast<Py_ssize_t>(offset), READONLY, nullptr};
}

constexpr PyMemberDef field_member(const char* name, int type, std::size_t in_fields) {
  return {name, type, static_cast<Py_ssize_t>(offsetof(PyWorkItem, fields) + in_fields), READONLY, nullptr};
}

// The members of a WorkItem. A number becomes a Python object only when it is read, because most numbers are
// never read.
std::array<PyMemberDef, 17> g_members{{
    object_member("kind", offsetof(PyWorkItem, kind)),
    number_member("stage", offsetof(PyWorkItem, stage)),
    number_member("minibatch", offsetof(PyWorkItem, minibatch)),
    number_member("microbatch", offsetof(PyWorkItem, microbatch)),
    number_member("read_slot", offsetof(PyWorkItem, read_slot)),
    number_member("write_slot", offsetof(PyWorkItem, write_slot)),
    object_member("edge", offsetof(PyWorkItem, edge)),
    object_member("tensors", offsetof(PyWorkItem, tensors)),
    field_member("data_fingerprint", T_ULONGLONG, offsetof(ItemFields, data_fingerprint)),
    field_member("gradients_overflowed", T_BOOL, offsetof(ItemFields, gradients_overflowed)),
    field_member("is_empty", T_BOOL, offsetof(ItemFields, is_empty)),
    field_member("is_end_of_data", T_BOOL, offsetof(ItemFields, is_end_of_data)),
    field_member("loss_scale", T_DOUBLE, offsetof(ItemFields, loss_scale)),
    field_member("boundary_events", T_UBYTE, offsetof(ItemFields, boundary_events)),
    number_member("freed_slot", offsetof(PyWorkItem, freed_slot)),
    number_member("num_minibatches", offsetof(PyWorkItem, num_minibatches)),
    {},
}};

void deallocate(PyObject* self) {
  auto* const item = reinterpret_cast<PyWorkItem*>(self);  // NOLINT(*-reinterpret-cast)
  PyTypeObject* const type = Py_TYPE(self);
  Py_XDECREF(item->kind);
  Py_XDECREF(item->edge);
  Py_XDECREF(item->tensors);
  type->tp_free(self);
  Py_DECREF(type);
}

class WorkItemType {
 public:
  WorkItemType() {
    std::array<PyType_Slot, 3> slots{{
        {Py_tp_members, g_members.data()},
        {Py_tp_dealloc, reinterpret_cast<void*>(deallocate)},  // NOLINT(*-reinterpret-cast)
        {0, nullptr},
    }};
    PyType_Spec spec{"pipedream._core.WorkItem", sizeof(PyWorkItem), 0,
                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots.data()};
    type_ = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));  // NOLINT(*-reinterpret-cast)
    if (type_ == nullptr) throw py::error_already_set();
    for (std::size_t opcode = 0; opcode < kOpcodeTraits.size(); ++opcode) {
      kinds_.at(opcode) = PyUnicode_InternFromString(kOpcodeTraits.at(opcode).name);
    }
    kinds_.back() = PyUnicode_InternFromString("DONE");
  }

  [[nodiscard]] py::object make(const WorkItem& work, const ItemFields& fields, const py::list& tensors,
                                std::int64_t freed_slot) const {
    auto made = py::reinterpret_steal<py::object>(type_->tp_alloc(type_, 0));
    if (!made) throw py::error_already_set();
    auto* const item = reinterpret_cast<PyWorkItem*>(made.ptr());  // NOLINT(*-reinterpret-cast)
    item->kind = Py_NewRef(work.opcode ? kinds_.at(static_cast<std::size_t>(*work.opcode)) : kinds_.back());
    item->edge =
        work.opcode && travels(*work.opcode) ? py::cast(work.edge).release().ptr() : Py_NewRef(Py_None);
    item->tensors = Py_NewRef(tensors.ptr());
    item->stage = work.stage.value();
    item->minibatch = work.minibatch.value();
    item->microbatch = work.microbatch.value();
    item->read_slot = work.read_slot.value();
    item->write_slot = work.write_slot.value();
    item->freed_slot = freed_slot;
    item->num_minibatches = work.num_minibatches;
    item->fields = fields;
    return made;
  }

  [[nodiscard]] py::handle type() const { return reinterpret_cast<PyObject*>(type_); }

 private:
  PyTypeObject* type_;                                       // lives as long as the process, as do the kinds
  std::array<PyObject*, kOpcodeTraits.size() + 1> kinds_{};  // names by Opcode, then "DONE"
};

const WorkItemType* g_work_item = nullptr;  // set once, when the module is imported

py::object call_fingerprint(const TensorExchange& exchange, FastArguments arguments) {
  const std::optional<std::uint64_t> found = exchange.fingerprint_of(list_in(arguments[0]));
  return found ? py::object(py::int_(*found)) : py::none();
}

}  // namespace

py::list PyItem::take_tensors() {
  py::list capsules;
  if (!received || is_end) return capsules;
  auto holder = std::make_shared<ItemHolder>(ItemHolder{pool, std::move(*received)});
  received.reset();
  for (const TensorView& tensor : holder->item.tensors) {
    capsules.append(to_capsule(tensor, device, device_index, holder));
  }
  return capsules;
}

py::object make_work_item(const WorkItem& work, const ItemFields& fields, const py::list& tensors,
                          std::int64_t freed_slot) {
  return g_work_item->make(work, fields, tensors, freed_slot);
}

void bind_items(py::module_& module) {
  g_work_item = new WorkItemType();  // NOLINT(cppcoreguidelines-owning-memory): as long as the process
  module.attr("WorkItem") = g_work_item->type();
  bind_item_fields(module);
  py::class_<TensorExchange, std::shared_ptr<TensorExchange>> exchange(module, "TensorExchange");
  exchange
      .def(py::init<const py::object&, py::object, py::object, py::object>(), py::arg("tensor_type"),
           py::arg("to_capsule"), py::arg("from_capsule"), py::arg("to_plain"))
      .def_property_readonly("by_table", &TensorExchange::by_table);
  def_fast<TensorExchange, &call_fingerprint, 1>(exchange, "fingerprint");
  py::class_<PyItem>(module, "ReceivedItem")
      .def_readonly("fields", &PyItem::fields)
      .def_readonly("is_end", &PyItem::is_end)
      .def("take_tensors", &PyItem::take_tensors);
}

}  // namespace pipedream
