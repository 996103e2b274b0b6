// Stores that go past the caches, for results that nobody reads soon: a plain store would first fetch the line it
// overwrites. Used by block.hpp.
#pragma once

#include <cstring>

#include "kernels.hpp"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace raydz::RAYDZ_ISA {

constexpr size_t kLine = 64;

#if defined(__SSE2__)
inline void stream_line(char* to, const char* from) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
#elif defined(__AVX__)
  for (size_t at = 0; at < kLine; at += 32) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at)));
  }
#else
  for (size_t at = 0; at < kLine; at += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + at), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at)));
  }
#endif
}

// Streaming stores of this thread become visible before what it stores next.
inline void end_streams() {
  _mm_sfence();
}
#else
// GCC has no such store for NEON; ARM's cores turn runs of full lines into one by themselves.
inline void stream_line(char* to, const char* from) {
  std::memcpy(to, from, kLine);
}

inline void end_streams() {}
#endif

// Copies whole lines past the caches, what comes before and after them with plain stores.
inline void stream(void* to, const void* from, size_t num_bytes) {
  auto* target = static_cast<char*>(to);
  const auto* source = static_cast<const char*>(from);
  size_t at = (kLine - reinterpret_cast<uintptr_t>(target) % kLine) % kLine;
  if (at > num_bytes) at = num_bytes;
  std::memcpy(target, source, at);
  for (; at + kLine <= num_bytes; at += kLine) stream_line(target + at, source + at);
  std::memcpy(target + at, source + at, num_bytes - at);
}

}  // namespace raydz::RAYDZ_ISA
