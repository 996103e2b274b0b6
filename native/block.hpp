// Walks a shard in blocks that stay in the first-level cache: decode what is 16-bit, update in fp32, encode the
// outputs.
//
// Used by adamw.hpp, lion.hpp, sgd.hpp. Mirrors `raydz/ops/operands.py`.
#pragma once

#include "rounding.hpp"
#include "stochastic.hpp"
#include "stream.hpp"

// Before a loop whose iterations touch element i alone, though its pointers may be equal: vectorise without asking.
#if defined(__clang__)
#define RAYDZ_ELEMENTWISE _Pragma("clang loop vectorize(assume_safety)")
#else
#define RAYDZ_ELEMENTWISE _Pragma("GCC ivdep")
#endif

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

// A block of one buffer: where its fp32 values are read, and where the updated ones are put.
struct Lent {
  const float* from;
  float* to;
};

// fp32 memory that is updated in place is lent itself, and second buffers that are not streamed are written directly;
// everything else goes through `buffer`.
inline Lent lend(const Span& from, const Span& into, const Operands& o, size_t start, size_t n, float* buffer) {
  if (from.type != Type::fp32) return {decode(from, start, n, buffer), buffer};
  return {fp32_at(from, start), o.is_apart && o.streams ? buffer : fp32_at(into, start)};
}

inline Lent lend_master(const Operands& o, size_t start, size_t n, float* buffer) {
  if (!is_present(o.from.low)) return lend(o.from.master, o.into.master, o, start, n, buffer);
  merge(half_at(o.from.master, start), static_cast<const int16_t*>(o.from.low.data) + start, buffer, 0, n);
  return {buffer, buffer};
}

// Calls write(target) for n 16-bit results of `into`: the memory itself, or a block of the cache that is then streamed.
template <class Write>
inline void put_halves(const Span& into, size_t start, size_t n, bool streams, const Write& write) {
  if (!streams) return write(half_at(into, start));
  alignas(64) uint16_t block[kBlock];
  write(block);
  stream(half_at(into, start), block, n * sizeof(uint16_t));
}

// `lane`: which bits of a word round a bf16 buffer that is alone.
inline void put(const Span& into, const Operands& o, size_t start, size_t n, const float* values, const uint64_t* words,
                unsigned lane) {
  const bool streams = o.is_apart && o.streams;
  if (into.type == Type::bf16) {
    put_halves(into, start, n, streams, [&](uint16_t* to) { round_by_chance(values, words, lane, n, to); });
  } else if (streams) {
    stream(fp32_at(into, start), values, n * sizeof(float));
  }
}

inline void put_master(const Operands& o, size_t start, size_t n, const float* values, const uint64_t* words) {
  if (!is_present(o.into.low)) return put(o.into.master, o, start, n, values, words, 0);
  const bool streams = o.is_apart && o.streams;
  put_halves(o.into.master, start, n, streams, [&](uint16_t* hi) {
    put_halves(o.into.low, start, n, streams,
               [&](uint16_t* low) { split(values, hi, reinterpret_cast<int16_t*>(low), 0, n); });
  });
}

inline bool is_by_chance(const Operands& o, size_t num_states) {
  bool found = o.from.master.type == Type::bf16 && !is_present(o.from.low);
  for (size_t k = 0; k < num_states; ++k) found = found || o.from.states[k].type == Type::bf16;
  return found;
}

// `update(master, grad, states, n)` computes fp32 values of a block and returns how many scaled gradients are not
// finite. Lane 0 of a word rounds the master, lane 1 + k state k.
template <size_t num_states, class Update>
inline int64_t for_blocks(const Operands& o, size_t begin, size_t end, const Update& update) {
  alignas(64) float grad_block[kBlock];
  alignas(64) float master_block[kBlock];
  alignas(64) float state_blocks[kMaxStates][kBlock];
  alignas(64) uint64_t words[kBlock];
  Lent states[kMaxStates] = {};
  const bool by_chance = is_by_chance(o, num_states);
  int64_t num_nonfinite = 0;
  for (size_t start = begin; start < end; start += kBlock) {
    const size_t n = end - start < kBlock ? end - start : kBlock;
    const float* grad = decode(o.grad, start, n, grad_block);
    const Lent master = lend_master(o, start, n, master_block);
    for (size_t k = 0; k < num_states; ++k) {
      states[k] = lend(o.from.states[k], o.into.states[k], o, start, n, state_blocks[k]);
    }
    num_nonfinite += update(master, grad, states, n);
    if (by_chance) random_words(o.noise, start, n, words);
    for (unsigned k = 0; k < num_states; ++k) put(o.into.states[k], o, start, n, states[k].to, words, 1 + k);
    put_master(o, start, n, master.to, words);
    if (is_present(o.out)) {
      put_halves(o.out, start, n, o.streams, [&](uint16_t* to) { encode(master.to, n, o.out.type, to); });
    }
  }
  if (o.streams) end_streams();
  return num_nonfinite;
}

}  // namespace raydz::RAYDZ_ISA
