// The Python module raydz._native: checks its arguments, releases the GIL and runs the kernels in chunks.
//
// Called by `raydz/ops/*.py` alone, which give the user typed errors first; the checks here keep a wrong call from
// writing outside a buffer. Tensors come in as DLPack, so no torch header is needed and one build serves every torch.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>

#include "dispatch.hpp"
#include "threads.hpp"

namespace nb = nanobind;
using nb::literals::operator""_a;
using Array = nb::ndarray<>;

namespace raydz {
namespace {

[[noreturn]] void refuse(const char* name, const char* why) {
  throw nb::value_error((std::string("raydz._native: ") + name + " " + why).c_str());
}

Type type_of(const Array& array, const char* name) {
  const nb::dlpack::dtype type = array.dtype();
  const auto code = static_cast<nb::dlpack::dtype_code>(type.code);
  if (type.lanes == 1 && type.bits == 32 && code == nb::dlpack::dtype_code::Float) return Type::fp32;
  if (type.lanes == 1 && type.bits == 16 && code == nb::dlpack::dtype_code::Bfloat) return Type::bf16;
  if (type.lanes == 1 && type.bits == 16 && code == nb::dlpack::dtype_code::Float) return Type::fp16;
  if (type.lanes == 1 && type.bits == 16 && code == nb::dlpack::dtype_code::Int) return Type::int16;
  refuse(name, "is not fp32, bf16, fp16 or int16");
}

void check_host(const Array& array, const char* name) {
  const int device = array.device_type();
  if (device != nb::device::cpu::value && device != nb::device::cuda_host::value) refuse(name, "is not in host memory");
}

Span span_of(const Array& array, const char* name, size_t numel) {
  check_host(array, name);
  int64_t dense = 1;
  for (size_t dim = array.ndim(); dim-- > 0;) {
    if (array.shape(dim) > 1 && array.stride(dim) != dense) refuse(name, "is not contiguous");
    dense *= static_cast<int64_t>(array.shape(dim));
  }
  if (array.size() != numel) refuse(name, "has another number of elements");
  return {array.data(), type_of(array, name), numel};
}

Span span_of(const Array& array, const char* name, size_t numel, Type wanted) {
  const Span span = span_of(array, name, numel);
  if (span.type != wanted) refuse(name, "has the wrong dtype");
  return span;
}

float* fp32_of(const Array& array, const char* name, size_t numel) {
  return static_cast<float*>(span_of(array, name, numel, Type::fp32).data);
}

int64_t adamw(const Array& master, const std::optional<Array>& low, const Array& grad, const Array& exp_avg,
              const Array& exp_avg_sq, const std::optional<Array>& out, const std::vector<float>& scalars,
              bool decoupled, int threads) {
  const size_t numel = master.size();
  AdamwBuffers buffers;
  buffers.master = span_of(master, "master", numel, low ? Type::bf16 : Type::fp32);
  if (low) buffers.low = span_of(*low, "low", numel, Type::int16);
  buffers.grad = span_of(grad, "grad", numel);
  if (buffers.grad.type == Type::int16) refuse("grad", "has the wrong dtype");
  buffers.exp_avg = fp32_of(exp_avg, "exp_avg", numel);
  buffers.exp_avg_sq = fp32_of(exp_avg_sq, "exp_avg_sq", numel);
  if (out) buffers.out = span_of(*out, "out", numel);
  if (out && buffers.out.type != Type::bf16 && buffers.out.type != Type::fp16) refuse("out", "has the wrong dtype");
  if (scalars.size() != 10) refuse("scalars", "are not ten");
  const AdamwScalars s = {scalars[0], scalars[1], scalars[2], scalars[3], scalars[4],
                          scalars[5], scalars[6], scalars[7], scalars[8], scalars[9]};
  nb::gil_scoped_release release;
  std::atomic<int64_t> num_nonfinite{0};
  parallel_for(numel, threads, [&, &kernels = active_kernels()](size_t begin, size_t end) {
    num_nonfinite += kernels.adamw(buffers, s, decoupled, begin, end);
  });
  return num_nonfinite;
}

void split(const Array& master, const Array& hi, const Array& low, int threads) {
  const size_t numel = master.size();
  const float* source = fp32_of(master, "master", numel);
  auto* upper = static_cast<uint16_t*>(span_of(hi, "hi", numel, Type::bf16).data);
  auto* lower = static_cast<int16_t*>(span_of(low, "low", numel, Type::int16).data);
  nb::gil_scoped_release release;
  parallel_for(numel, threads, [&, &kernels = active_kernels()](size_t begin, size_t end) {
    kernels.split(source, upper, lower, begin, end);
  });
}

void merge(const Array& hi, const Array& low, const Array& out, int threads) {
  const size_t numel = hi.size();
  const auto* upper = static_cast<uint16_t*>(span_of(hi, "hi", numel, Type::bf16).data);
  const auto* lower = static_cast<int16_t*>(span_of(low, "low", numel, Type::int16).data);
  float* target = fp32_of(out, "out", numel);
  nb::gil_scoped_release release;
  parallel_for(numel, threads, [&, &kernels = active_kernels()](size_t begin, size_t end) {
    kernels.merge(upper, lower, target, begin, end);
  });
}

void round(const Array& source, const Array& out, int threads) {
  const size_t numel = source.size();
  const float* values = fp32_of(source, "source", numel);
  auto* target = static_cast<uint16_t*>(span_of(out, "out", numel, Type::bf16).data);
  nb::gil_scoped_release release;
  parallel_for(numel, threads, [&, &kernels = active_kernels()](size_t begin, size_t end) {
    kernels.round(values, target, begin, end);
  });
}

double sum_squares(const Array& values, int threads) {
  const size_t numel = values.size();
  const Span span = span_of(values, "values", numel);
  if (span.type == Type::int16) refuse("values", "has the wrong dtype");
  nb::gil_scoped_release release;
  std::vector<double> block_sums((numel + kReductionBlock - 1) / kReductionBlock);
  parallel_for(numel, threads, [&, &kernels = active_kernels()](size_t begin, size_t end) {
    kernels.sum_squares(span, block_sums.data(), begin, end);
  });
  double total = 0;
  for (const double sum : block_sums) total += sum;
  return total;
}

void sum_rows(const Array& rows, const Array& out, bool accumulate, int threads) {
  check_host(rows, "rows");
  if (rows.ndim() != 2 || rows.shape(0) < 1) refuse("rows", "is not a matrix with at least one row");
  const size_t numel = rows.shape(1);
  if (numel > 1 && rows.stride(1) != 1) refuse("rows", "has rows that are not contiguous");
  if (rows.shape(0) > 1 && rows.stride(0) < 0) refuse("rows", "has a negative stride");
  const Type type = type_of(rows, "rows");
  if (type == Type::int16) refuse("rows", "has the wrong dtype");
  RowsBuffers buffers;
  buffers.rows = {rows.data(), type, numel};
  buffers.num_rows = rows.shape(0);
  buffers.stride = static_cast<size_t>(rows.stride(0));
  buffers.out = fp32_of(out, "out", numel);
  buffers.accumulate = accumulate;
  nb::gil_scoped_release release;
  parallel_for(numel, threads,
               [&, &kernels = active_kernels()](size_t begin, size_t end) { kernels.sum_rows(buffers, begin, end); });
}

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Kernels* table : available_kernels()) names.emplace_back(table->isa);
  return names;
}

void select_isa(const std::string& name) {
  if (!select_kernels(name)) refuse(name.c_str(), "is no instruction set of this build and processor");
}

}  // namespace
}  // namespace raydz

NB_MODULE(_native, m) {
  m.doc() = "Compiled kernels of raydz on host memory. Use raydz.ops, which checks and falls back.";
  m.attr("__version__") = RAYDZ_VERSION;
  m.def("adamw", &raydz::adamw, "master"_a, "low"_a.none(), "grad"_a, "exp_avg"_a, "exp_avg_sq"_a, "out"_a.none(),
        "scalars"_a, "decoupled"_a, "threads"_a);
  m.def("split", &raydz::split, "master"_a, "hi"_a, "low"_a, "threads"_a);
  m.def("merge", &raydz::merge, "hi"_a, "low"_a, "out"_a, "threads"_a);
  m.def("round", &raydz::round, "source"_a, "out"_a, "threads"_a);
  m.def("sum_squares", &raydz::sum_squares, "values"_a, "threads"_a);
  m.def("sum_rows", &raydz::sum_rows, "rows"_a, "out"_a, "accumulate"_a, "threads"_a);
  m.def("isa", [] { return raydz::active_kernels().isa; });
  m.def("available_isas", &raydz::available_isas);
  m.def("select_isa", &raydz::select_isa, "name"_a);
}
