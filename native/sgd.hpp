// SGD, with and without momentum, in one pass. Mirrors `sgd_step` of `raydz/ops/flat.py`, operation by operation.
#pragma once

#include "block.hpp"

namespace raydz::RAYDZ_ISA {

enum class Momentum : uint8_t { none, heavy, nesterov };

template <bool has_l2, Momentum kind>
inline int32_t sgd_block(Lent master, const float* __restrict grad, Lent momentum, size_t n, const SgdScalars s,
                         bool is_first) {
  int32_t num_nonfinite = 0;
  RAYDZ_ELEMENTWISE
  for (size_t i = 0; i < n; ++i) {
    float g = grad[i] * s.grad_scale;
    num_nonfinite += (bits_of(g) & kInfinity) == kInfinity;
    if constexpr (has_l2) g = g + master.from[i] * s.l2;
    if constexpr (kind != Momentum::none) {
      const float later = momentum.from[i] * s.momentum + g * s.one_minus_dampening;
      const float m = is_first ? g : later;
      momentum.to[i] = m;
      g = kind == Momentum::nesterov ? g + m * s.momentum : m;
    }
    master.to[i] = master.from[i] - g * s.lr;
  }
  return num_nonfinite;
}

template <Momentum kind>
inline int64_t sgd_of(const Operands& o, const SgdScalars& s, const SgdForm& form, size_t begin, size_t end) {
  constexpr size_t num_states = kind == Momentum::none ? 0 : 1;
  return for_blocks<num_states>(o, begin, end, [&](Lent master, const float* grad, const Lent* states, size_t n) {
    return form.has_l2 ? sgd_block<true, kind>(master, grad, states[0], n, s, form.is_first)
                       : sgd_block<false, kind>(master, grad, states[0], n, s, form.is_first);
  });
}

inline int64_t sgd(const Operands& o, const SgdScalars& s, const SgdForm& form, size_t begin, size_t end) {
  if (!form.has_momentum) return sgd_of<Momentum::none>(o, s, form, begin, end);
  if (form.nesterov) return sgd_of<Momentum::nesterov>(o, s, form, begin, end);
  return sgd_of<Momentum::heavy>(o, s, form, begin, end);
}

}  // namespace raydz::RAYDZ_ISA
