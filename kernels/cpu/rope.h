// Rotary position embeddings in place, and keys and values into the pool (kernels/reference.py: rope, store_kv).
#pragma once
#include <math.h>
#include <string.h>

#include "abi.h"
#include "simd.h"

namespace baton {

// Cosines, then sines, of one position: [2][half].
BATON_INLINE void angles(float position, const float *frequencies, float scale, float *out, int half) {
  for (int i = 0; i < half; i++) {
    float sine, cosine;
    sincosf(position * frequencies[i], &sine, &cosine);
    out[i] = cosine * scale;
    out[half + i] = sine * scale;
  }
}

// Rotates the pairs (i, i + half) of one head; computed in float32.
BATON_INLINE void rotate(bf16 *head, const float *table, int half) {
  int i = 0;
  for (; i + 16 <= half; i += 16) {
    const __m512 a = load_bf16(head + i), b = load_bf16(head + half + i);
    const __m512 c = _mm512_loadu_ps(table + i), s = _mm512_loadu_ps(table + half + i);
    store_bf16(head + i, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
    store_bf16(head + half + i, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
  }
  if (i == half) return;  // else 8 are left (head_dim 80)
  const __mmask16 rest = (__mmask16)((1u << (half - i)) - 1);
  auto load = [&](const bf16 *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(rest, p)), 16));
  };
  const __m512 a = load(head + i), b = load(head + half + i);
  const __m512 c = _mm512_maskz_loadu_ps(rest, table + i), s = _mm512_maskz_loadu_ps(rest, table + half + i);
  auto store = [&](bf16 *p, __m512 v) { _mm256_mask_storeu_epi16(p, rest, (__m256i)_mm512_cvtneps_pbh(v)); };
  store(head + i, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
  store(head + half + i, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
}

// Where a head of a block begins, in keys as in values.
BATON_INLINE size_t place_of(int block, int head, const BatonModel &m) {
  return ((size_t)block * m.kv_heads + head) * BATON_BLOCK_TOKENS * m.head_dim;
}

// Puts one token's key and value at place `at` of a block's head.
BATON_INLINE void store_kv(const bf16 *key, const bf16 *value, bf16 *keys, bf16 *values, int at, int head_dim) {
  uint32_t *k = (uint32_t *)keys + at;
  for (int pair = 0; pair < head_dim / 2; pair++, k += BATON_BLOCK_TOKENS) memcpy(k, key + 2 * pair, 4);
  bf16 *v = values + (size_t)(at / 2) * 2 * head_dim;  // pairs of tokens, of which this is one
  for (int i = 0; i < head_dim; i += 16) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(value + i)));
    if (at % 2) _mm512_mask_storeu_epi16(v + 2 * i, 0xaaaaaaaa, _mm512_slli_epi32(wide, 16));
    else _mm512_mask_storeu_epi16(v + 2 * i, 0x55555555, wide);
  }
}

// Zeroes the values from place `at` on: attention multiplies them by zero, and zero times infinity is not zero.
BATON_INLINE void clear_values(bf16 *values, int at, int head_dim) {
  for (; at < BATON_BLOCK_TOKENS && at % 2; at++)
    for (int i = 0; i < head_dim; i++) values[(size_t)(at / 2) * 2 * head_dim + 2 * i + 1] = 0;
  if (at < BATON_BLOCK_TOKENS)
    memset(values + (size_t)at * head_dim, 0, (size_t)(BATON_BLOCK_TOKENS - at) * head_dim * sizeof(bf16));
}

}  // namespace baton
