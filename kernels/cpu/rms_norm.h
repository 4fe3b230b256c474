// out = x / sqrt(mean(x^2) + eps) * weight, float32 in, bfloat16 out (kernels/reference.py: rms_norm).
#pragma once
#include <math.h>

#include "simd.h"

namespace baton {

BATON_INLINE void rms_norm_row(const float *x, const float *weight, bf16 *out, int hidden, float eps) {
  __m512 squares = _mm512_setzero_ps();
  for (int i = 0; i < hidden; i += 16) {
    const __m512 v = _mm512_loadu_ps(x + i);
    squares = _mm512_fmadd_ps(v, v, squares);
  }
  const __m512 scale = _mm512_set1_ps(1.f / sqrtf(_mm512_reduce_add_ps(squares) / hidden + eps));
  for (int i = 0; i < hidden; i += 16)
    store_bf16(out + i, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + i), scale), _mm512_loadu_ps(weight + i)));
}

}  // namespace baton
