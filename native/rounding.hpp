// fp32 master <-> bf16 weight + int16 remainder. Mirrors `raydz/ops/rounding.py`.
#pragma once

#include "convert.hpp"

namespace raydz::RAYDZ_ISA {

inline void split(const float* __restrict master, uint16_t* __restrict hi, int16_t* __restrict low, size_t begin,
                  size_t end) {
  for (size_t i = begin; i < end; ++i) {
    const uint32_t bits = bits_of(master[i]);
    const uint16_t upper = to_bf16(bits);
    hi[i] = upper;
    low[i] = low_of(bits, upper);
  }
}

inline void merge(const uint16_t* __restrict hi, const int16_t* __restrict low, float* __restrict out, size_t begin,
                  size_t end) {
  for (size_t i = begin; i < end; ++i) out[i] = merged(hi[i], low[i]);
}

inline void round(const float* __restrict source, uint16_t* __restrict out, size_t begin, size_t end) {
  for (size_t i = begin; i < end; ++i) out[i] = to_bf16(bits_of(source[i]));
}

}  // namespace raydz::RAYDZ_ISA
