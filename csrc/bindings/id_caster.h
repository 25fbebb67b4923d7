// Lets bound functions take and return the core's ids. In Python an id is an int. Include this in every
// source that binds a function with ids.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "base/ids.h"

namespace pybind11::detail {

template <class Tag>
struct type_caster<pipedream::StrongId<Tag>> {
  PYBIND11_TYPE_CASTER(pipedream::StrongId<Tag>, const_name("int"));

  bool load(handle source, bool converts) {
    make_caster<std::int64_t> number;
    if (!number.load(source, converts)) return false;
    value = pipedream::StrongId<Tag>(cast_op<std::int64_t>(number));
    return true;
  }
  static handle cast(pipedream::StrongId<Tag> id, return_value_policy policy, handle parent) {
    return make_caster<std::int64_t>::cast(id.value(), policy, parent);
  }
};

}  // namespace pybind11::detail
