// AdamW and Adam in one pass over master, gradient and moments. Mirrors `raydz/ops/adamw.py`, operation by operation.
//
// Works on blocks that stay in the first-level cache: decode the 16-bit inputs, update in fp32, encode the outputs.
#pragma once

#include <cmath>

#include "rounding.hpp"

namespace raydz::RAYDZ_ISA {

constexpr size_t kBlock = 512;

// Every product, sum, quotient and root is rounded to fp32 by itself (-ffp-contract=off).
template <bool decoupled>
inline int32_t update(float* __restrict master, const float* __restrict grad, float* __restrict exp_avg,
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

inline int64_t adamw(const AdamwBuffers& b, const AdamwScalars& scalars, bool decoupled, size_t begin, size_t end) {
  alignas(64) float grad_block[kBlock];
  alignas(64) float master_block[kBlock];
  int64_t num_nonfinite = 0;
  uint16_t* const hi = static_cast<uint16_t*>(b.master.data);
  int16_t* const low = static_cast<int16_t*>(b.low.data);
  for (size_t start = begin; start < end; start += kBlock) {
    const size_t n = end - start < kBlock ? end - start : kBlock;
    const float* grad = decode(b.grad, start, n, grad_block);
    float* master = master_block;
    if (low) {
      merge(hi + start, low + start, master, 0, n);
    } else {
      master = static_cast<float*>(b.master.data) + start;
    }
    num_nonfinite += decoupled ? update<true>(master, grad, b.exp_avg + start, b.exp_avg_sq + start, n, scalars)
                               : update<false>(master, grad, b.exp_avg + start, b.exp_avg_sq + start, n, scalars);
    if (low) split(master, hi + start, low + start, 0, n);
    if (b.out.data) encode(master, n, b.out, start);
  }
  return num_nonfinite;
}

}  // namespace raydz::RAYDZ_ISA
