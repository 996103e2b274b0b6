// Walks a shard in blocks that stay in the first-level cache: decode what is 16-bit, update in fp32, encode the
// outputs.
//
// Used by adamw.hpp, lion.hpp, sgd.hpp. Mirrors `raydz/ops/operands.py`.
#pragma once

#include "rounding.hpp"
#include "stochastic.hpp"

namespace raydz::RAYDZ_ISA {

constexpr size_t kBlock = 512;

inline bool is_present(const Span& span) {
  return span.data != nullptr;
}

inline float* fp32_at(const Span& span, size_t start) {
  return static_cast<float*>(span.data) + start;
}

inline uint16_t* half_at(const Span& span, size_t start) {
  return static_cast<uint16_t*>(span.data) + start;
}

// The fp32 values of a block: the memory itself, or `buffer` filled with them.
inline float* lend(const Span& span, size_t start, size_t n, float* buffer) {
  if (span.type == Type::fp32) return fp32_at(span, start);
  decode(span, start, n, buffer);
  return buffer;
}

inline float* lend_master(const Operands& o, size_t start, size_t n, float* buffer) {
  if (!is_present(o.low)) return lend(o.master, start, n, buffer);
  merge(half_at(o.master, start), static_cast<const int16_t*>(o.low.data) + start, buffer, 0, n);
  return buffer;
}

// `update(master, grad, states, n)` changes fp32 values of a block in place and returns how many scaled gradients are
// not finite. Lane 0 of a word rounds the master, lane 1 + k state k.
template <size_t num_states, class Update>
inline int64_t for_blocks(const Operands& o, size_t begin, size_t end, const Update& update) {
  alignas(64) float grad_block[kBlock];
  alignas(64) float master_block[kBlock];
  alignas(64) float state_blocks[kMaxStates][kBlock];
  alignas(64) uint64_t words[kBlock];
  float* states[kMaxStates] = {};
  bool by_chance = o.master.type == Type::bf16 && !is_present(o.low);
  for (size_t k = 0; k < num_states; ++k) by_chance = by_chance || o.states[k].type == Type::bf16;
  int64_t num_nonfinite = 0;
  for (size_t start = begin; start < end; start += kBlock) {
    const size_t n = end - start < kBlock ? end - start : kBlock;
    const float* grad = decode(o.grad, start, n, grad_block);
    float* master = lend_master(o, start, n, master_block);
    for (size_t k = 0; k < num_states; ++k) states[k] = lend(o.states[k], start, n, state_blocks[k]);
    num_nonfinite += update(master, grad, states, n);
    if (by_chance) random_words(o.noise, start, n, words);
    for (unsigned k = 0; k < num_states; ++k) {
      if (o.states[k].type == Type::bf16) round_by_chance(states[k], words, 1 + k, n, half_at(o.states[k], start));
    }
    if (is_present(o.low)) {
      split(master, half_at(o.master, start), static_cast<int16_t*>(o.low.data) + start, 0, n);
    } else if (o.master.type == Type::bf16) {
      round_by_chance(master, words, 0, n, half_at(o.master, start));
    }
    if (is_present(o.out)) encode(master, n, o.out, start);
  }
  return num_nonfinite;
}

}  // namespace raydz::RAYDZ_ISA
