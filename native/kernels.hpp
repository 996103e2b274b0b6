// What a kernel is: its arguments and the table of them that every instruction set provides.
//
// Below: adamw.hpp, lion.hpp, sgd.hpp, rounding.hpp, reduction.hpp (generic sources) -> kernels.cpp (compiled once an
// instruction set). Above: dispatch.cpp chooses a table, optimizers.cpp and module.cpp call it in chunks.
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

// Where random bits of a call begin: element i has the word of counter first + i. See stochastic.hpp.
struct Noise {
  uint64_t key = 0;
  uint64_t first = 0;
};

constexpr size_t kMaxStates = 2;

// Weights and states in one of their forms.
struct Kept {
  Span master;              // fp32; bf16 when `low` holds the other half; bf16 alone is rounded by chance
  Span low;                 // int16 or absent
  Span states[kMaxStates];  // fp32, or bf16, which is rounded by chance
};

// What an optimizer's step reads and writes.
struct Operands {
  Kept from;
  Kept into;  // the same memory as `from`, or second buffers of the same types
  Span grad;  // fp32, bf16 or fp16
  Span out;   // bf16, fp16 or absent
  Noise noise;
  bool is_apart = false;  // `into` is other memory
  bool streams = false;   // write what was not read with stores that go past the caches
};

// The scalars of one step, computed in double by the caller and rounded to fp32 once.
struct AdamwScalars {
  float grad_scale, decay, l2, beta1, one_minus_beta1, beta2, one_minus_beta2, sqrt_bias2, eps, step_size;
};

struct LionScalars {
  float grad_scale, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, lr;
};

struct SgdScalars {
  float grad_scale, l2, momentum, one_minus_dampening, lr;
};

// Which terms an SGD step has. A term that is off is left out, not multiplied by zero: -0 + 0 is another zero.
struct SgdForm {
  bool has_l2, has_momentum, nesterov, is_first;
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
  // Steps return how many scaled gradients are not finite.
  int64_t (*adamw)(const Operands&, const AdamwScalars&, bool decoupled, size_t begin, size_t end);
  int64_t (*lion)(const Operands&, const LionScalars&, size_t begin, size_t end);
  int64_t (*sgd)(const Operands&, const SgdScalars&, const SgdForm&, size_t begin, size_t end);
  void (*split)(const float* master, uint16_t* hi, int16_t* low, size_t begin, size_t end);
  void (*merge)(const uint16_t* hi, const int16_t* low, float* out, size_t begin, size_t end);
  void (*round)(const float* source, uint16_t* out, size_t begin, size_t end);
  // One sum for each kReductionBlock; `begin` is a multiple of it.
  void (*sum_squares)(const Span& values, double* block_sums, size_t begin, size_t end);
  void (*sum_rows)(const RowsBuffers&, size_t begin, size_t end);
};

}  // namespace raydz
