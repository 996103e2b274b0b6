// Conversions between fp32 and the 16-bit types, in integer arithmetic that vectorises on every instruction set.
//
// Used by stochastic.hpp, rounding.hpp, reduction.hpp. Mirrors `raydz/ops/rounding.py`. Every function is compiled into
// namespace raydz::RAYDZ_ISA: code for one instruction set must never be merged with that of another by the linker.
#pragma once

#include <cstring>

#include "kernels.hpp"

namespace raydz::RAYDZ_ISA {

constexpr uint32_t kInfinity = 0x7f800000;
constexpr uint32_t kMagnitude = 0x7fffffff;

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline bool is_nan(uint32_t bits) {
  return (bits & kMagnitude) > kInfinity;
}

// Half up in magnitude, so that the remainder always fits int16. A NaN keeps its sign and upper payload and is made
// quiet: its payload could otherwise round to infinity or carry into the sign.
inline uint16_t to_bf16(uint32_t bits) {
  const uint32_t rounded = (bits + 0x8000u) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x0040u;
  return static_cast<uint16_t>(is_nan(bits) ? quiet : rounded);
}

inline int16_t low_of(uint32_t bits, uint16_t hi) {
  const uint32_t remainder = bits - (static_cast<uint32_t>(hi) << 16);
  return static_cast<int16_t>(is_nan(bits) ? 0u : remainder);
}

inline float merged(uint16_t hi, int16_t low) {
  return float_of((static_cast<uint32_t>(hi) << 16) + static_cast<uint32_t>(static_cast<int32_t>(low)));
}

inline float from_bf16(uint16_t half) {
  return float_of(static_cast<uint32_t>(half) << 16);
}

inline float from_fp16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fffu) << 13;
  const uint32_t exponent = magnitude & 0x0f800000u;
  const uint32_t normal = magnitude + (112u << 23);   // exponent bias 15 -> 127
  const uint32_t special = magnitude + (224u << 23);  // exponent 31 -> 255
  // 2^-14 * (1 + m/1024) - 2^-14: exact, and never a denormal operand.
  const uint32_t subnormal = bits_of(float_of(magnitude + (113u << 23)) - float_of(113u << 23));
  const uint32_t small_or_normal = exponent == 0 ? subnormal : normal;
  return float_of(sign | (exponent == 0x0f800000u ? special : small_or_normal));
}

// Half to even, as torch and the hardware do.
inline uint16_t to_fp16(uint32_t bits) {
  constexpr uint32_t kTooLarge = (127u + 16u) << 23;
  constexpr uint32_t kSmallestNormal = 113u << 23;
  constexpr uint32_t kShift = ((127u - 15u) + (23u - 10u) + 1u) << 23;
  const uint32_t magnitude = bits & kMagnitude;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t subnormal = bits_of(float_of(magnitude) + float_of(kShift)) - kShift;
  const uint32_t special = magnitude > kInfinity ? 0x7e00u : 0x7c00u;
  const uint32_t small_or_normal = magnitude < kSmallestNormal ? subnormal : normal;
  return static_cast<uint16_t>((magnitude >= kTooLarge ? special : small_or_normal) | ((bits & ~kMagnitude) >> 16));
}

// Elements [begin, begin + n) as fp32: in place where they are already, else written to `buffer`.
inline const float* decode(const Span& source, size_t begin, size_t n, float* __restrict buffer) {
  if (source.type == Type::fp32) return static_cast<const float*>(source.data) + begin;
  const uint16_t* __restrict half = static_cast<const uint16_t*>(source.data) + begin;
  if (source.type == Type::bf16) {
    for (size_t i = 0; i < n; ++i) buffer[i] = from_bf16(half[i]);
  } else {
    for (size_t i = 0; i < n; ++i) buffer[i] = from_fp16(half[i]);
  }
  return buffer;
}

inline void encode(const float* __restrict source, size_t n, Type type, uint16_t* __restrict half) {
  if (type == Type::bf16) {
    for (size_t i = 0; i < n; ++i) half[i] = to_bf16(bits_of(source[i]));
  } else {
    for (size_t i = 0; i < n; ++i) half[i] = to_fp16(bits_of(source[i]));
  }
}

}  // namespace raydz::RAYDZ_ISA
