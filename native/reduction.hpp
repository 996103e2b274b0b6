// Sums in an order that is part of the contract: the result depends on the values alone, not on the instruction set,
// the vector width or the number of threads. Mirrors `raydz/ops/reduction.py`.
#pragma once

#include "convert.hpp"

namespace raydz::RAYDZ_ISA {

constexpr size_t kLanes = 16;
constexpr size_t kColumns = 512;

// Lane j adds the squares of elements j, 16 + j, 32 + j, … in that order, in fp64, where an fp32 square is exact.
// Then lanes are folded in halves: 8 apart, 4, 2, 1.
inline double sum_block(const float* values, size_t n) {
  double lanes[kLanes] = {};
  const size_t whole = n - n % kLanes;
  for (size_t i = 0; i < whole; i += kLanes) {
    for (size_t j = 0; j < kLanes; ++j) lanes[j] += static_cast<double>(values[i + j]) * values[i + j];
  }
  for (size_t j = 0; j < n - whole; ++j) lanes[j] += static_cast<double>(values[whole + j]) * values[whole + j];
  for (size_t half = kLanes / 2; half > 0; half /= 2) {
    for (size_t j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  }
  return lanes[0];
}

inline void sum_squares(const Span& values, double* block_sums, size_t begin, size_t end) {
  alignas(64) float buffer[kReductionBlock];
  for (size_t start = begin; start < end; start += kReductionBlock) {
    const size_t n = end - start < kReductionBlock ? end - start : kReductionBlock;
    block_sums[start / kReductionBlock] = sum_block(decode(values, start, n, buffer), n);
  }
}

// ((row 0 + row 1) + row 2) + … in fp32, then, when accumulating, out + that sum.
inline void sum_rows(const RowsBuffers& b, size_t begin, size_t end) {
  alignas(64) float buffer[kColumns];
  alignas(64) float sum[kColumns];
  for (size_t start = begin; start < end; start += kColumns) {
    const size_t n = end - start < kColumns ? end - start : kColumns;
    float* __restrict out = b.out + start;
    std::memcpy(sum, decode(b.rows, start, n, buffer), n * sizeof(float));
    for (size_t row = 1; row < b.num_rows; ++row) {
      const float* values = decode(b.rows, row * b.stride + start, n, buffer);
      for (size_t i = 0; i < n; ++i) sum[i] = sum[i] + values[i];
    }
    if (b.accumulate) {
      for (size_t i = 0; i < n; ++i) out[i] = out[i] + sum[i];
    } else {
      std::memcpy(out, sum, n * sizeof(float));
    }
  }
}

}  // namespace raydz::RAYDZ_ISA
