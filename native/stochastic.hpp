// Rounding from fp32 to bf16 by chance. Mirrors `raydz/ops/stochastic.py`; used by block.hpp.
#pragma once

#include "convert.hpp"

namespace raydz::RAYDZ_ISA {

// Words of elements [start, start + n) of a call: SplitMix64 at the counters key + (element + 1) * step.
inline void random_words(const Noise& noise, size_t start, size_t n, uint64_t* __restrict words) {
  const uint64_t first = noise.first + start + 1;
  for (size_t i = 0; i < n; ++i) {
    uint64_t z = noise.key + (first + i) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    words[i] = z ^ (z >> 31);
  }
}

// `chance` is 16 random bits. Infinities stay, a NaN is made quiet.
inline uint16_t to_bf16_by_chance(uint32_t bits, uint32_t chance) {
  const uint32_t rounded = (bits + chance) >> 16;
  const uint32_t kept = (bits >> 16) | (is_nan(bits) ? 0x0040u : 0u);
  return static_cast<uint16_t>((bits & kInfinity) == kInfinity ? kept : rounded);
}

// `lane` is which 16 bits of a word decide.
inline void round_by_chance(const float* __restrict source, const uint64_t* __restrict words, unsigned lane, size_t n,
                            uint16_t* __restrict out) {
  const unsigned shift = 16 * lane;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t chance = static_cast<uint32_t>(words[i] >> shift) & 0xffffu;
    out[i] = to_bf16_by_chance(bits_of(source[i]), chance);
  }
}

}  // namespace raydz::RAYDZ_ISA
