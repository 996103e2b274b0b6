// The optimizers' steps of raydz._native: one pass over a shard each, one call of the pool for any number of them.
//
// Called by `raydz/ops/{adamw,elementwise,batch}.py` alone.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <initializer_list>

#include "arguments.hpp"
#include "dispatch.hpp"
#include "threads.hpp"

using nb::literals::operator""_a;

namespace raydz {
namespace {

using Optional = std::optional<Array>;
// (key, first), as `raydz.ops.stochastic.Noise`.
using NoiseArgument = std::optional<std::pair<uint64_t, uint64_t>>;
// (master, low, states), as `raydz.ops.operands.Into`.
using IntoArgument = std::optional<std::tuple<Array, Optional, std::vector<Array>>>;

// A call that writes so many elements leaves nothing in the caches that is worth keeping there. See README.md.
std::atomic<size_t> stream_from{size_t{1} << 20};

// A step that is checked and can be run at any time; it keeps its buffers alive.
struct Step {
  size_t numel;
  std::function<int64_t(const Kernels&, size_t begin, size_t end)> run;
  std::vector<Array> buffers;
};

struct Named {
  const Array* array;
  const char* name;
};

void refuse_unless(bool fits, const char* name) {
  if (!fits) refuse(name, "has the wrong dtype");
}

bool overlap(const Span& a, const Span& b) {
  const auto bytes = [](const Span& span) { return span.size * (span.type == Type::fp32 ? 4 : 2); };
  const auto *first = static_cast<char*>(a.data), *second = static_cast<char*>(b.data);
  return std::less<>()(first, second + bytes(b)) && std::less<>()(second, first + bytes(a));
}

Span second_buffer(const Array& array, const char* name, const Span& like) {
  const Span span = span_of(array, name, like.size, like.type);
  if (overlap(span, like)) refuse(name, "overlaps what is read");
  return span;
}

void set_into(Operands& o, const IntoArgument& into, bool has_low, size_t num_states) {
  o.into = o.from;
  if (!into) return;
  const auto& [master, low, states] = *into;
  o.is_apart = true;
  o.into.master = second_buffer(master, "into.master", o.from.master);
  if (low.has_value() != has_low) refuse("into.low", "is there on one side alone");
  if (low) o.into.low = second_buffer(*low, "into.low", o.from.low);
  if (states.size() != num_states) refuse("into.states", "are not as many as this step has");
  for (size_t k = 0; k < num_states; ++k) o.into.states[k] = second_buffer(states[k], "into.states", o.from.states[k]);
}

Operands operands_of(const Array& master, const Optional& low, const Array& grad, const std::vector<Named>& states,
                     const Optional& out, const NoiseArgument& noise, const IntoArgument& into) {
  const size_t numel = master.size();
  Operands o;
  o.from.master = span_of(master, "master", numel);
  if (low) o.from.low = span_of(*low, "low", numel, Type::int16);
  // What is bf16 alone is rounded by chance, which needs noise.
  const auto is_wide = [&](Type type) { return type == Type::fp32 || (type == Type::bf16 && noise); };
  refuse_unless(low ? o.from.master.type == Type::bf16 : is_wide(o.from.master.type), "master");
  o.grad = span_of(grad, "grad", numel);
  refuse_unless(o.grad.type != Type::int16, "grad");
  for (size_t k = 0; k < states.size(); ++k) {
    o.from.states[k] = span_of(*states[k].array, states[k].name, numel);
    refuse_unless(is_wide(o.from.states[k].type), states[k].name);
  }
  if (out) o.out = span_of(*out, "out", numel);
  refuse_unless(!out || o.out.type == Type::bf16 || o.out.type == Type::fp16, "out");
  if (noise) o.noise = {noise->first, noise->second};
  set_into(o, into, low.has_value(), states.size());
  o.streams = numel >= stream_from.load();
  return o;
}

std::vector<Array> buffers_of(const Array& master, const Optional& low, const Array& grad,
                              const std::vector<Named>& states, const Optional& out, const IntoArgument& into) {
  std::vector<Array> kept = {master, grad};
  if (low) kept.push_back(*low);
  if (out) kept.push_back(*out);
  for (const Named& state : states) kept.push_back(*state.array);
  if (into) {
    kept.push_back(std::get<0>(*into));
    if (std::get<1>(*into)) kept.push_back(*std::get<1>(*into));
    for (const Array& state : std::get<2>(*into)) kept.push_back(state);
  }
  return kept;
}

// `Scalars` is a struct of floats alone.
template <class Scalars>
Scalars scalars_of(const std::vector<float>& values) {
  Scalars scalars;
  if (values.size() * sizeof(float) != sizeof scalars) refuse("scalars", "are not as many as this step has");
  std::memcpy(&scalars, values.data(), sizeof scalars);
  return scalars;
}

Step adamw(const Array& master, const Optional& low, const Array& grad, const Array& exp_avg, const Array& exp_avg_sq,
           const Optional& out, const std::vector<float>& scalars, bool decoupled, const NoiseArgument& noise,
           const IntoArgument& into) {
  const std::vector<Named> states = {{&exp_avg, "exp_avg"}, {&exp_avg_sq, "exp_avg_sq"}};
  const Operands o = operands_of(master, low, grad, states, out, noise, into);
  const auto s = scalars_of<AdamwScalars>(scalars);
  return {
      master.size(),
      [o, s, decoupled](const Kernels& k, size_t begin, size_t end) { return k.adamw(o, s, decoupled, begin, end); },
      buffers_of(master, low, grad, states, out, into)};
}

Step lion(const Array& master, const Optional& low, const Array& grad, const Array& exp_avg, const Optional& out,
          const std::vector<float>& scalars, const NoiseArgument& noise, const IntoArgument& into) {
  const std::vector<Named> states = {{&exp_avg, "exp_avg"}};
  const Operands o = operands_of(master, low, grad, states, out, noise, into);
  const auto s = scalars_of<LionScalars>(scalars);
  return {master.size(), [o, s](const Kernels& k, size_t begin, size_t end) { return k.lion(o, s, begin, end); },
          buffers_of(master, low, grad, states, out, into)};
}

Step sgd(const Array& master, const Optional& low, const Array& grad, const Optional& momentum_buffer,
         const Optional& out, const std::vector<float>& scalars, bool has_l2, bool nesterov, bool is_first,
         const NoiseArgument& noise, const IntoArgument& into) {
  std::vector<Named> states;
  if (momentum_buffer) states.push_back({&*momentum_buffer, "momentum_buffer"});
  const Operands o = operands_of(master, low, grad, states, out, noise, into);
  const auto s = scalars_of<SgdScalars>(scalars);
  const SgdForm form = {has_l2, momentum_buffer.has_value(), nesterov, is_first};
  return {master.size(),
          [o, s, form](const Kernels& k, size_t begin, size_t end) { return k.sgd(o, s, form, begin, end); },
          buffers_of(master, low, grad, states, out, into)};
}

// Returns how many scaled gradients of all steps are not finite.
int64_t run_steps(const std::vector<const Step*>& steps, int threads) {
  std::vector<size_t> sizes;
  for (const Step* step : steps) sizes.push_back(step->numel);
  nb::gil_scoped_release release;
  std::atomic<int64_t> num_nonfinite{0};
  parallel_for_all(sizes, threads, [&, &kernels = active_kernels()](size_t index, size_t begin, size_t end) {
    num_nonfinite += steps[index]->run(kernels, begin, end);
  });
  return num_nonfinite;
}

}  // namespace

void bind_optimizers(nb::module_& m) {
  nb::class_<Step>(m, "Step", "One optimizer step that is ready to run.");
  m.def("adamw", &adamw, "master"_a, "low"_a.none(), "grad"_a, "exp_avg"_a, "exp_avg_sq"_a, "out"_a.none(), "scalars"_a,
        "decoupled"_a, "noise"_a.none() = nb::none(), "into"_a.none() = nb::none());
  m.def("lion", &lion, "master"_a, "low"_a.none(), "grad"_a, "exp_avg"_a, "out"_a.none(), "scalars"_a,
        "noise"_a.none() = nb::none(), "into"_a.none() = nb::none());
  m.def("sgd", &sgd, "master"_a, "low"_a.none(), "grad"_a, "momentum_buffer"_a.none(), "out"_a.none(), "scalars"_a,
        "has_l2"_a, "nesterov"_a, "is_first"_a, "noise"_a.none() = nb::none(), "into"_a.none() = nb::none());
  m.def("run_steps", &run_steps, "steps"_a, "threads"_a);
  m.def("set_stream_from", [](size_t numel) { return stream_from.exchange(numel); }, "numel"_a);
}

}  // namespace raydz
