// Lion in one pass. Mirrors `lion_step` of `raydz/ops/flat.py`, operation by operation.
#pragma once

#include "block.hpp"

namespace raydz::RAYDZ_ISA {

inline int32_t lion_block(Lent master, const float* __restrict grad, Lent exp_avg, size_t n, const LionScalars s) {
  int32_t num_nonfinite = 0;
  RAYDZ_ELEMENTWISE
  for (size_t i = 0; i < n; ++i) {
    const float g = grad[i] * s.grad_scale;
    num_nonfinite += (bits_of(g) & kInfinity) == kInfinity;
    const float before = exp_avg.from[i];
    const float mixed = before * s.beta1 + g * s.one_minus_beta1;
    const float sign = (mixed > 0.0f ? 1.0f : 0.0f) - (mixed < 0.0f ? 1.0f : 0.0f);  // of a NaN 0, as torch has it
    master.to[i] = master.from[i] * s.decay - sign * s.lr;
    exp_avg.to[i] = before * s.beta2 + g * s.one_minus_beta2;
  }
  return num_nonfinite;
}

inline int64_t lion(const Operands& o, const LionScalars& s, size_t begin, size_t end) {
  return for_blocks<1>(o, begin, end, [&](Lent master, const float* grad, const Lent* states, size_t n) {
    return lion_block(master, grad, states[0], n, s);
  });
}

}  // namespace raydz::RAYDZ_ISA
