// AdamW and Adam in one pass over master, gradient and moments. Mirrors `raydz/ops/adamw.py`, operation by operation.
#pragma once

#include <cmath>

#include "block.hpp"
#include "divide.hpp"

namespace raydz::RAYDZ_ISA {

// Every product, sum, quotient and root is rounded to fp32 by itself (-ffp-contract=off).
template <bool decoupled>
inline int32_t adamw_block(Lent master, const float* __restrict grad, Lent exp_avg, Lent exp_avg_sq, size_t n,
                           const AdamwScalars s) {
  const Divisor sqrt_bias2(s.sqrt_bias2);
  int32_t num_nonfinite = 0;
  RAYDZ_ELEMENTWISE
  for (size_t i = 0; i < n; ++i) {
    float g = grad[i] * s.grad_scale;
    num_nonfinite += (bits_of(g) & kInfinity) == kInfinity;
    float p = master.from[i];
    if constexpr (decoupled) {
      p = p * s.decay;
    } else {
      g = g + p * s.l2;
    }
    const float m = exp_avg.from[i] * s.beta1 + g * s.one_minus_beta1;
    const float v = exp_avg_sq.from[i] * s.beta2 + (g * g) * s.one_minus_beta2;
    const float denominator = sqrt_bias2.divided(std::sqrt(v)) + s.eps;
    exp_avg.to[i] = m;
    exp_avg_sq.to[i] = v;
    master.to[i] = p - s.step_size * (m / denominator);
  }
  return num_nonfinite;
}

inline int64_t adamw(const Operands& o, const AdamwScalars& s, bool decoupled, size_t begin, size_t end) {
  return for_blocks<2>(o, begin, end, [&](Lent master, const float* grad, const Lent* states, size_t n) {
    return decoupled ? adamw_block<true>(master, grad, states[0], states[1], n, s)
                     : adamw_block<false>(master, grad, states[0], states[1], n, s);
  });
}

}  // namespace raydz::RAYDZ_ISA
