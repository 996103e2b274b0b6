// AdamW and Adam in one pass over master, gradient and moments. Mirrors `raydz/ops/adamw.py`, operation by operation.
#pragma once

#include <cmath>

#include "block.hpp"

namespace raydz::RAYDZ_ISA {

// Every product, sum, quotient and root is rounded to fp32 by itself (-ffp-contract=off).
template <bool decoupled>
inline int32_t adamw_block(float* __restrict master, const float* __restrict grad, float* __restrict exp_avg,
                           float* __restrict exp_avg_sq, size_t n, const AdamwScalars& s) {
  int32_t num_nonfinite = 0;
  for (size_t i = 0; i < n; ++i) {
    float g = grad[i] * s.grad_scale;
    num_nonfinite += (bits_of(g) & kInfinity) == kInfinity;
    float p = master[i];
    if constexpr (decoupled) {
      p = p * s.decay;
    } else {
      g = g + p * s.l2;
    }
    const float m = exp_avg[i] * s.beta1 + g * s.one_minus_beta1;
    const float v = exp_avg_sq[i] * s.beta2 + (g * g) * s.one_minus_beta2;
    const float denominator = std::sqrt(v) / s.sqrt_bias2 + s.eps;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    master[i] = p - s.step_size * (m / denominator);
  }
  return num_nonfinite;
}

inline int64_t adamw(const Operands& o, const AdamwScalars& s, bool decoupled, size_t begin, size_t end) {
  return for_blocks<2>(o, begin, end, [&](float* master, const float* grad, float* const* states, size_t n) {
    return decoupled ? adamw_block<true>(master, grad, states[0], states[1], n, s)
                     : adamw_block<false>(master, grad, states[0], states[1], n, s);
  });
}

}  // namespace raydz::RAYDZ_ISA
