// A division by one number for many others, without a divide instruction and with its bits. See "One division less" in
// README.md. Used by adamw.hpp.
#pragma once

#include "convert.hpp"

namespace raydz::RAYDZ_ISA {

#if defined(__FMA__) || defined(__AVX512F__) || defined(__ARM_FEATURE_FMA)

// `divisor` in [1e-8, 1]; divided(x) for x = 0, x in [1e-23, infinity] and NaN.
struct Divisor {
  float divisor, high, low;  // high + low = 1 / divisor to 48 bits, high rounded to nearest

  explicit Divisor(float value) : divisor(value), high(static_cast<float>(1.0 / value)) {
    low = static_cast<float>(1.0 / static_cast<double>(value) - high);
  }

  float divided(float x) const {
    const float quotient = __builtin_fmaf(x, high, x * low);          // at most 0.5001 of its last place off
    const float remainder = __builtin_fmaf(-quotient, divisor, x);    // exact
    const float rounded = __builtin_fmaf(remainder, high, quotient);  // Markstein 1990: x / divisor, rounded
    return remainder == remainder ? rounded : quotient;               // infinity - infinity
  }
};

#else

struct Divisor {
  float divisor;

  explicit Divisor(float value) : divisor(value) {}

  float divided(float x) const { return x / divisor; }
};

#endif

}  // namespace raydz::RAYDZ_ISA
