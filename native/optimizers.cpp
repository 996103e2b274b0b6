// The optimizers' steps of raydz._native: one pass over a shard each. Called by `raydz/ops/{adamw,lion,sgd}.py` alone.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <cstring>
#include <initializer_list>

#include "arguments.hpp"
#include "dispatch.hpp"
#include "threads.hpp"

using nb::literals::operator""_a;

namespace raydz {
namespace {

// (key, first), as `raydz.ops.stochastic.Noise`.
using NoiseArgument = std::optional<std::pair<uint64_t, uint64_t>>;

struct Named {
  const Array* array;
  const char* name;
};

void refuse_unless(bool fits, const char* name) {
  if (!fits) refuse(name, "has the wrong dtype");
}

Operands operands_of(const Array& master, const std::optional<Array>& low, const Array& grad,
                     std::initializer_list<Named> states, const std::optional<Array>& out, const NoiseArgument& noise) {
  const size_t numel = master.size();
  Operands o;
  o.master = span_of(master, "master", numel);
  if (low) o.low = span_of(*low, "low", numel, Type::int16);
  // What is bf16 alone is rounded by chance, which needs noise.
  const auto is_wide = [&](Type type) { return type == Type::fp32 || (type == Type::bf16 && noise); };
  refuse_unless(low ? o.master.type == Type::bf16 : is_wide(o.master.type), "master");
  o.grad = span_of(grad, "grad", numel);
  refuse_unless(o.grad.type != Type::int16, "grad");
  size_t index = 0;
  for (const Named& state : states) {
    Span& span = o.states[index++];
    span = span_of(*state.array, state.name, numel);
    refuse_unless(is_wide(span.type), state.name);
  }
  if (out) o.out = span_of(*out, "out", numel);
  refuse_unless(!out || o.out.type == Type::bf16 || o.out.type == Type::fp16, "out");
  if (noise) o.noise = {noise->first, noise->second};
  return o;
}

// `Scalars` is a struct of floats alone.
template <class Scalars>
Scalars scalars_of(const std::vector<float>& values) {
  Scalars scalars;
  if (values.size() * sizeof(float) != sizeof scalars) refuse("scalars", "are not as many as this step has");
  std::memcpy(&scalars, values.data(), sizeof scalars);
  return scalars;
}

template <class Step>
int64_t run(size_t numel, int threads, const Step& step) {
  nb::gil_scoped_release release;
  std::atomic<int64_t> num_nonfinite{0};
  parallel_for(numel, threads, [&, &kernels = active_kernels()](size_t begin, size_t end) {
    num_nonfinite += step(kernels, begin, end);
  });
  return num_nonfinite;
}

int64_t adamw(const Array& master, const std::optional<Array>& low, const Array& grad, const Array& exp_avg,
              const Array& exp_avg_sq, const std::optional<Array>& out, const std::vector<float>& scalars,
              bool decoupled, int threads, const NoiseArgument& noise) {
  const Operands o = operands_of(master, low, grad, {{&exp_avg, "exp_avg"}, {&exp_avg_sq, "exp_avg_sq"}}, out, noise);
  const auto s = scalars_of<AdamwScalars>(scalars);
  return run(master.size(), threads, [&](const Kernels& kernels, size_t begin, size_t end) {
    return kernels.adamw(o, s, decoupled, begin, end);
  });
}

int64_t lion(const Array& master, const std::optional<Array>& low, const Array& grad, const Array& exp_avg,
             const std::optional<Array>& out, const std::vector<float>& scalars, int threads,
             const NoiseArgument& noise) {
  const Operands o = operands_of(master, low, grad, {{&exp_avg, "exp_avg"}}, out, noise);
  const auto s = scalars_of<LionScalars>(scalars);
  return run(master.size(), threads,
             [&](const Kernels& kernels, size_t begin, size_t end) { return kernels.lion(o, s, begin, end); });
}

int64_t sgd(const Array& master, const std::optional<Array>& low, const Array& grad,
            const std::optional<Array>& momentum_buffer, const std::optional<Array>& out,
            const std::vector<float>& scalars, bool has_l2, bool nesterov, bool is_first, int threads,
            const NoiseArgument& noise) {
  const Operands o = momentum_buffer
                         ? operands_of(master, low, grad, {{&*momentum_buffer, "momentum_buffer"}}, out, noise)
                         : operands_of(master, low, grad, {}, out, noise);
  const auto s = scalars_of<SgdScalars>(scalars);
  const SgdForm form = {has_l2, momentum_buffer.has_value(), nesterov, is_first};
  return run(master.size(), threads,
             [&](const Kernels& kernels, size_t begin, size_t end) { return kernels.sgd(o, s, form, begin, end); });
}

}  // namespace

void bind_optimizers(nb::module_& m) {
  m.def("adamw", &adamw, "master"_a, "low"_a.none(), "grad"_a, "exp_avg"_a, "exp_avg_sq"_a, "out"_a.none(), "scalars"_a,
        "decoupled"_a, "threads"_a, "noise"_a.none() = nb::none());
  m.def("lion", &lion, "master"_a, "low"_a.none(), "grad"_a, "exp_avg"_a, "out"_a.none(), "scalars"_a, "threads"_a,
        "noise"_a.none() = nb::none());
  m.def("sgd", &sgd, "master"_a, "low"_a.none(), "grad"_a, "momentum_buffer"_a.none(), "out"_a.none(), "scalars"_a,
        "has_l2"_a, "nesterov"_a, "is_first"_a, "threads"_a, "noise"_a.none() = nb::none());
}

}  // namespace raydz
