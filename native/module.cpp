// The Python module raydz._native: checks its arguments, releases the GIL and runs the kernels in chunks.
//
// Called by `raydz/ops/*.py` alone, which give the user typed errors first; the checks of arguments.hpp keep a wrong
// call from writing outside a buffer. The optimizers' steps are in optimizers.cpp.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "arguments.hpp"
#include "dispatch.hpp"
#include "threads.hpp"

using nb::literals::operator""_a;

namespace raydz {
namespace {

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
  nb::set_leak_warnings(false);  // a queue that nobody closed before the process ends is no fault worth a page of text
  raydz::bind_optimizers(m);
  raydz::bind_aio(m);
  m.def("split", &raydz::split, "master"_a, "hi"_a, "low"_a, "threads"_a);
  m.def("merge", &raydz::merge, "hi"_a, "low"_a, "out"_a, "threads"_a);
  m.def("round", &raydz::round, "source"_a, "out"_a, "threads"_a);
  m.def("sum_squares", &raydz::sum_squares, "values"_a, "threads"_a);
  m.def("sum_rows", &raydz::sum_rows, "rows"_a, "out"_a, "accumulate"_a, "threads"_a);
  m.def("num_pool_threads", &raydz::num_pool_threads);
  m.def("set_pool_affinity", &raydz::set_pool_affinity, "processors"_a);
  m.def("isa", [] { return raydz::active_kernels().isa; });
  m.def("available_isas", &raydz::available_isas);
  m.def("select_isa", &raydz::select_isa, "name"_a);
}
