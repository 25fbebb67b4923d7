// Makes ItemFields a Python type. Python reads and sets members of the C++ struct directly, which is fast
// enough to do for every work item. Called with the GIL held.
#pragma once

#include <pybind11/pybind11.h>

#include "wire/item_fields.h"

namespace pipedream {

// Makes the Python type. Call it before anything else of this file.
void bind_item_fields(pybind11::module_& module);

// The fields in the object; null if it has another type.
[[nodiscard]] ItemFields* item_fields_in(pybind11::handle object);
[[nodiscard]] pybind11::object make_item_fields(const ItemFields& fields);

}  // namespace pipedream

namespace pybind11::detail {

template <>
struct type_caster<pipedream::ItemFields> {
  PYBIND11_TYPE_CASTER(pipedream::ItemFields, const_name("ItemFields"));

  bool load(handle source, bool /*converts*/) {
    const pipedream::ItemFields* const fields = pipedream::item_fields_in(source);
    if (fields == nullptr) return false;
    value = *fields;
    return true;
  }
  static handle cast(const pipedream::ItemFields& fields, return_value_policy /*policy*/, handle /*parent*/) {
    return pipedream::make_item_fields(fields).release();
  }
};

}  // namespace pybind11::detail
