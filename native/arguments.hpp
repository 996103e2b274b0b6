// Buffers of Python as spans: refuses what is on another device, not contiguous, or of another length or dtype.
//
// Used by module.cpp and optimizers.cpp. Tensors come in as DLPack, so no torch header is needed and one build serves
// every torch.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>

#include "kernels.hpp"

namespace nb = nanobind;

namespace raydz {

using Array = nb::ndarray<>;

[[noreturn]] inline void refuse(const char* name, const char* why) {
  throw nb::value_error((std::string("raydz._native: ") + name + " " + why).c_str());
}

inline Type type_of(const Array& array, const char* name) {
  const nb::dlpack::dtype type = array.dtype();
  const auto code = static_cast<nb::dlpack::dtype_code>(type.code);
  if (type.lanes == 1 && type.bits == 32 && code == nb::dlpack::dtype_code::Float) return Type::fp32;
  if (type.lanes == 1 && type.bits == 16 && code == nb::dlpack::dtype_code::Bfloat) return Type::bf16;
  if (type.lanes == 1 && type.bits == 16 && code == nb::dlpack::dtype_code::Float) return Type::fp16;
  if (type.lanes == 1 && type.bits == 16 && code == nb::dlpack::dtype_code::Int) return Type::int16;
  refuse(name, "is not fp32, bf16, fp16 or int16");
}

inline void check_host(const Array& array, const char* name) {
  const int device = array.device_type();
  if (device != nb::device::cpu::value && device != nb::device::cuda_host::value) refuse(name, "is not in host memory");
}

inline Span span_of(const Array& array, const char* name, size_t numel) {
  check_host(array, name);
  int64_t dense = 1;
  for (size_t dim = array.ndim(); dim-- > 0;) {
    if (array.shape(dim) > 1 && array.stride(dim) != dense) refuse(name, "is not contiguous");
    dense *= static_cast<int64_t>(array.shape(dim));
  }
  if (array.size() != numel) refuse(name, "has another number of elements");
  return {array.data(), type_of(array, name), numel};
}

inline Span span_of(const Array& array, const char* name, size_t numel, Type wanted) {
  const Span span = span_of(array, name, numel);
  if (span.type != wanted) refuse(name, "has the wrong dtype");
  return span;
}

inline float* fp32_of(const Array& array, const char* name, size_t numel) {
  return static_cast<float*>(span_of(array, name, numel, Type::fp32).data);
}

// Adds the functions of optimizers.cpp and the class of aio_module.cpp.
void bind_optimizers(nb::module_& m);
void bind_aio(nb::module_& m);

}  // namespace raydz
