// Maps a dtype to the type of its elements, for both backends of the codecs. Internal to csrc/codec; pure,
// any thread.
#pragma once

#include "base/check.h"
#include "base/dtype.h"
#include "codec/codec_math.h"

namespace pipedream {

template <class T>
struct ElementType {
  using Type = T;
};

// Calls body(ElementType<T>) with the element type T of a dtype that codecs apply to.
template <class Body>
auto with_element_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(ElementType<float>{});
    case DType::kFloat64:
      return body(ElementType<double>{});
    case DType::kBFloat16:
      return body(ElementType<BFloat16>{});
    case DType::kFloat16:
      return body(ElementType<Float16>{});
    default:
      PD_CHECK(false, "a codec of " << dtype_name(dtype));
  }
}

}  // namespace pipedream
