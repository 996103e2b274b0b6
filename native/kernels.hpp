// What a kernel is: its arguments and the table of them that every instruction set provides.
//
// Below: convert.hpp, adamw.hpp, rounding.hpp, reduction.hpp (generic sources) -> kernels.cpp (compiled once an
// instruction set). Above: dispatch.cpp chooses a table, module.cpp calls it in chunks.
#pragma once

#include <cstddef>
#include <cstdint>

namespace raydz {

enum class Type : uint8_t { fp32, bf16, fp16, int16 };

// A flat buffer whose element type is known at run time only.
struct Span {
  void* data = nullptr;
  Type type = Type::fp32;
  size_t size = 0;
};

// Elements whose squares are summed on their own; a multiple of it is the unit that threads share out.
constexpr size_t kReductionBlock = 4096;

// The scalars of one step, computed in double by the caller and rounded to fp32 once.
struct AdamwScalars {
  float grad_scale, decay, l2, beta1, one_minus_beta1, beta2, one_minus_beta2, sqrt_bias2, eps, step_size;
};

struct AdamwBuffers {
  Span master;  // fp32, or bf16 when `low` holds the other half
  Span low;     // int16 or absent
  Span grad;    // fp32, bf16 or fp16
  float* exp_avg = nullptr;
  float* exp_avg_sq = nullptr;
  Span out;  // bf16, fp16 or absent
};

struct RowsBuffers {
  Span rows;  // row r starts at element r * stride
  size_t num_rows = 0;
  size_t stride = 0;
  float* out = nullptr;
  bool accumulate = false;
};

// Every function works on the elements [begin, end), so that a thread can take a part.
struct Kernels {
  const char* isa;
  int64_t (*adamw)(const AdamwBuffers&, const AdamwScalars&, bool decoupled, size_t begin, size_t end);
  void (*split)(const float* master, uint16_t* hi, int16_t* low, size_t begin, size_t end);
  void (*merge)(const uint16_t* hi, const int16_t* low, float* out, size_t begin, size_t end);
  void (*round)(const float* source, uint16_t* out, size_t begin, size_t end);
  // One sum for each kReductionBlock; `begin` is a multiple of it.
  void (*sum_squares)(const Span& values, double* block_sums, size_t begin, size_t end);
  void (*sum_rows)(const RowsBuffers&, size_t begin, size_t end);
};

}  // namespace raydz
