#include "bindings/items.h"

#include <pybind11/stl.h>

#include <array>
#include <utility>

#include "base/check.h"
#include "bindings/tensor_exchange.h"

namespace py = pybind11;

namespace pipedream {

namespace {

class WorkItemType {
 public:
  WorkItemType() {
    static std::array<PyStructSequence_Field, kNumFields + 1> fields{{
        {"kind", "FORWARD, RECOMPUTE, BACKWARD, UPDATE, SEND, RECV or DONE"},
        {"stage", nullptr},
        {"minibatch", nullptr},
        {"microbatch", nullptr},
        {"read_slot", nullptr},
        {"write_slot", nullptr},
        {"edge", "SEND, RECV: which; else None."},
        {"tensors",
         "FORWARD: activations from upstream. BACKWARD: gradients from downstream. RECV: the edge's, "
         "none where both ends are this worker's."},
        {"data_fingerprint", "FORWARD: of the minibatch's data, as the first stage took it."},
        {"gradients_overflowed", "FORWARD: whether a stage upstream has had some that did."},
        {"is_empty", "FORWARD: the microbatch has no samples."},
        {"loss_scale", "BACKWARD: of the loss that the gradients are of; 0: it is not scaled."},
        {"freed_slot", "Whose version nobody reads any more because of the item before; -1: none."},
        {"num_minibatches", "DONE: how many there were."},
        {nullptr, nullptr},
    }};
    static PyStructSequence_Desc description{"pipedream._core.WorkItem", "What to do next.", fields.data(),
                                             kNumFields};
    type_ = PyStructSequence_NewType(&description);
    if (type_ == nullptr) throw py::error_already_set();
    for (const WorkKind kind : {WorkKind::kForward, WorkKind::kRecompute, WorkKind::kBackward,
                                WorkKind::kUpdate, WorkKind::kSend, WorkKind::kRecv, WorkKind::kDone}) {
      kinds_.at(static_cast<std::size_t>(kind)) = PyUnicode_InternFromString(work_kind_name(kind));
    }
  }

  [[nodiscard]] py::object make(const WorkItem& work, const ItemFields& fields, const py::list& tensors,
                                std::int64_t freed_slot) const {
    const auto item = py::reinterpret_steal<py::object>(PyStructSequence_New(type_));
    if (!item) throw py::error_already_set();
    int field_index = 0;
    const auto add = [&](PyObject* value) { PyStructSequence_SetItem(item.ptr(), field_index++, value); };
    add(Py_NewRef(kinds_.at(static_cast<std::size_t>(work.kind))));
    for (const std::int64_t number : {work.stage.value(), work.minibatch.value(), work.microbatch.value(),
                                      work.read_slot.value(), work.write_slot.value()}) {
      add(PyLong_FromLongLong(number));
    }
    const bool travels = work.kind == WorkKind::kSend || work.kind == WorkKind::kRecv;
    add(travels ? py::cast(work.edge).release().ptr() : Py_NewRef(Py_None));
    add(Py_NewRef(tensors.ptr()));
    add(PyLong_FromUnsignedLongLong(fields.data_fingerprint));
    add(PyBool_FromLong(fields.gradients_overflowed ? 1 : 0));
    add(PyBool_FromLong(fields.is_empty ? 1 : 0));
    add(PyFloat_FromDouble(fields.loss_scale));
    add(PyLong_FromLongLong(freed_slot));
    add(PyLong_FromLongLong(work.num_minibatches));
    PD_CHECK(field_index == kNumFields, field_index);
    return item;
  }

  [[nodiscard]] py::handle type() const { return reinterpret_cast<PyObject*>(type_); }

 private:
  static constexpr int kNumFields = 14;

  PyTypeObject* type_;                // as long as the process, as are the kinds
  std::array<PyObject*, 7> kinds_{};  // by WorkKind
};

const WorkItemType* g_work_item = nullptr;  // set once, when the module is imported

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
  py::class_<ItemFields>(module, "ItemFields", "What an item says of itself beside its tensors.")
      .def(py::init([](std::uint64_t data_fingerprint, double loss_scale, bool gradients_overflowed,
                       bool is_empty, std::uint32_t num_minibatches, bool is_end_of_data) {
             return ItemFields{data_fingerprint, loss_scale,      gradients_overflowed,
                               is_empty,         num_minibatches, is_end_of_data};
           }),
           py::kw_only(), py::arg("data_fingerprint") = 0, py::arg("loss_scale") = 0.0,
           py::arg("gradients_overflowed") = false, py::arg("is_empty") = false,
           py::arg("num_minibatches") = 0, py::arg("is_end_of_data") = false)
      .def_readwrite("data_fingerprint", &ItemFields::data_fingerprint)
      .def_readwrite("loss_scale", &ItemFields::loss_scale, "0: the loss is not scaled.")
      .def_readwrite("gradients_overflowed", &ItemFields::gradients_overflowed)
      .def_readwrite("is_empty", &ItemFields::is_empty, "The microbatch has no samples.")
      .def_readwrite("num_minibatches", &ItemFields::num_minibatches,
                     "That pushed gradients are the sum of; with is_end_of_data: of the run.")
      .def_readwrite("is_end_of_data", &ItemFields::is_end_of_data, "Instead of gradients: no more come.");
  py::class_<TensorExchange, std::shared_ptr<TensorExchange>>(
      module, "TensorExchange", "How a framework's tensors become the core's and back.")
      .def(py::init<const py::object&, py::object, py::object>(), py::arg("tensor_type"),
           py::arg("to_capsule"), py::arg("from_capsule"))
      .def("fingerprint", &TensorExchange::fingerprint_of, py::arg("tensors"),
           "64 bits of what the tensors hold, with dtypes and shapes; None where one is not plain contiguous "
           "host memory.")
      .def_property_readonly("by_table", &TensorExchange::by_table,
                             "By the type's table of C functions; else by capsules.");
  py::class_<PyItem>(module, "ReceivedItem", "An item outside the schedule.")
      .def_readonly("fields", &PyItem::fields)
      .def_readonly("is_end", &PyItem::is_end)
      .def("take_tensors", &PyItem::take_tensors, "DLPack capsules of its tensors, once.");
}

}  // namespace pipedream
