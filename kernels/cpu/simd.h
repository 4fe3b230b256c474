// The few vector operations everything here is made of: 512 bits, 16 float32 or 32 bfloat16.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#define BATON_INLINE static inline __attribute__((always_inline))

namespace baton {

using bf16 = uint16_t;

BATON_INLINE __m512 load_bf16(const bf16 *p) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}

BATON_INLINE void store_bf16(bf16 *p, __m512 v) { _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(v)); }

// Four bytes at p, in all lanes: a pair of bfloat16 or four int8 of an activation.
BATON_INLINE __m512i spread(const void *p) {
  int32_t word;
  __builtin_memcpy(&word, p, sizeof word);
  return _mm512_set1_epi32(word);
}

// c + a.b over pairs of bfloat16
BATON_INLINE __m512 dot(__m512 c, __m512i a, __m512i b) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }

// c + a.b over fours of uint8 (a) and int8 (b). In assembly, for GCC 12 spills the accumulators of the intrinsic.
BATON_INLINE __m512i dot8(__m512i c, __m512i a, __m512i b) {
  asm("vpdpbusd %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));
  return c;
}

// 2^x for x <= 127; below -126 it fades to zero. Taylor to the sixth order on [-1/2, 1/2]: 1.2e-7 relative.
BATON_INLINE __m512 exp2(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-150.f), x);  // this order keeps a NaN
  const __m512 whole = _mm512_roundscale_ps(x, 8);
  const __m512 f = _mm512_sub_ps(x, whole);
  __m512 p = _mm512_set1_ps(1.5403530e-4f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.3333558e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.6181291e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5504109e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022651e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314718e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.f));
  return _mm512_scalef_ps(p, whole);
}

constexpr float LOG2_E = 1.44269504f;

BATON_INLINE __m512 exp(__m512 x) { return exp2(_mm512_mul_ps(x, _mm512_set1_ps(LOG2_E))); }

// x * sigmoid(x)
BATON_INLINE __m512 silu(__m512 x) {
  const __m512 turned = _mm512_mul_ps(x, _mm512_set1_ps(-LOG2_E));
  const __m512 e = exp2(_mm512_min_ps(_mm512_set1_ps(126.f), turned));
  return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.f), e));
}

BATON_INLINE void prefetch(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T0); }

constexpr long ceil_div(long a, long b) { return (a + b - 1) / b; }

}  // namespace baton
