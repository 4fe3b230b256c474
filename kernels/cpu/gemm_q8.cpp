// GGUF's Q8_0 as it comes: int8 weights in groups of 32 inputs, a float16 scale d each: w = d * (u - 128).
#include "gemm.h"

namespace baton {
namespace {

constexpr int GROUP = 32, GROUP_BYTES = GROUP * BATON_PANEL + BATON_PANEL * 2;

template <int ROWS>
struct Tile {
  static void run(int first, const Ahead &ahead, const Activations &x, const uint8_t *panel, int in, int column, const Target &target) {
    const int groups = in / GROUP;
    const int8_t *values = x.quantised.values + (size_t)first * in;
    const float *scales = x.quantised.scales + (size_t)first * groups;
    const int32_t *sums = x.quantised.sums + (size_t)first * groups;
    __m512 sum[ROWS][2];
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    const uint8_t *w = panel;
    for (int group = 0; group < groups; group++, w += GROUP_BYTES) {
      __m512i c[ROWS][2];
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; r++) c[r][0] = c[r][1] = _mm512_set1_epi32(-128 * sums[(size_t)r * groups + group]);
#pragma GCC unroll 8
      for (int k = 0; k < GROUP / 4; k++) {
        const __m512i w0 = _mm512_load_si512(w + k * 128), w1 = _mm512_load_si512(w + k * 128 + 64);
        ahead.fetch((size_t)(w - panel) + k * 128);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) {
          const __m512i v = spread(values + (size_t)r * in + group * GROUP + 4 * k);
          c[r][0] = dot8(c[r][0], w0, v);
          c[r][1] = dot8(c[r][1], w1, v);
        }
      }
      const __m256i *d = (const __m256i *)(w + GROUP * BATON_PANEL);
      const __m512 d0 = _mm512_cvtph_ps(_mm256_load_si256(d)), d1 = _mm512_cvtph_ps(_mm256_load_si256(d + 1));
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; r++) {
        const __m512 s = _mm512_set1_ps(scales[(size_t)r * groups + group]);
        sum[r][0] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(c[r][0]), s), d0, sum[r][0]);
        sum[r][1] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(c[r][1]), s), d1, sum[r][1]);
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++) deliver(target, first + r, column, sum[r][0], sum[r][1]);
  }
};

}  // namespace

void multiply_q8(const Activations &x, const void *panel, int in, int first, int rows, int column,
                 const Target &target) {
  in_tiles<Tile, 6>(first, rows, panel, panel_bytes(BATON_Q8, in), x, (const uint8_t *)panel, in, column, target);
}

}  // namespace baton
