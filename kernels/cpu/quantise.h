// bfloat16 activations to int8 in groups along a row: value = scale * q, scale = largest magnitude / 127.
//
// `sums` are the sums of a group's q: what a weight's offset is multiplied with. The rest of the last group is zero. A
// group that is not finite has a scale that is not, so nothing is hidden.
#pragma once
#include "simd.h"

namespace baton {

struct Quantised {
  int8_t *values;  // [rows][padded]
  float *scales;   // [rows][groups]
  int32_t *sums;   // [rows][groups]
};

// GROUP is 32 or 64; `width` is a multiple of 16, out of which `padded`, a multiple of GROUP, is written.
template <int GROUP>
BATON_INLINE void quantise_row(const bf16 *x, int width, int padded, int8_t *values, float *scales, int32_t *sums) {
  constexpr int VECTORS = GROUP / 16;
  for (int group = 0; group < padded / GROUP; group++) {
    __m512 v[VECTORS];
    __m512i largest = _mm512_setzero_si512();  // magnitudes compare as integers, and NaN is above all
    for (int i = 0; i < VECTORS; i++) {
      const int at = group * GROUP + i * 16;
      v[i] = at < width ? load_bf16(x + at) : _mm512_setzero_ps();
      largest = _mm512_max_epi32(largest, _mm512_castps_si512(_mm512_abs_ps(v[i])));
    }
    const int32_t bits = _mm512_reduce_max_epi32(largest);
    float most;
    __builtin_memcpy(&most, &bits, sizeof most);
    scales[group] = most / 127.f;
    const __m512 by = _mm512_set1_ps(most > 1e-30f ? 127.f / most : 0.f);
    __m512i sum = _mm512_setzero_si512();
    for (int i = 0; i < VECTORS; i++) {
      // NaN, which this order of operands turns into 127, would become the least integer, whose multiples overflow.
      const __m512i q = _mm512_cvtps_epi32(_mm512_min_ps(_mm512_mul_ps(v[i], by), _mm512_set1_ps(127.f)));
      sum = _mm512_add_epi32(sum, q);
      _mm_storeu_si128((__m128i *)(values + group * GROUP + i * 16), _mm512_cvtsepi32_epi8(q));
    }
    sums[group] = _mm512_reduce_add_epi32(sum);
  }
}

}  // namespace baton
