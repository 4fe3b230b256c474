// int8 weights with a scale a column, int8 activations in groups of 64: w = scale * (u - 128).
#include "gemm.h"

namespace baton {
namespace {

constexpr int GROUP = 64;

template <int ROWS>
struct Tile {
  static void run(int first, const Ahead &ahead, const Activations &x, const uint8_t *panel, int in, int column, const Target &target) {
    const int padded = padded_of(BATON_INT8, in), groups = padded / GROUP;
    const int8_t *values = x.quantised.values + (size_t)first * padded;
    const float *scales = x.quantised.scales + (size_t)first * groups;
    const int32_t *sums = x.quantised.sums + (size_t)first * groups;
    __m512 sum[ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (int group = 0; group < groups; group++) {
      __m512i c[ROWS][2];
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; r++) c[r][0] = c[r][1] = _mm512_set1_epi32(-128 * sums[(size_t)r * groups + group]);
      const uint8_t *w = panel + (size_t)group * GROUP * BATON_PANEL;
      const int8_t *a = values + group * GROUP;
      for (int k = 0; k < GROUP / 4; k++, w += 128) {
        const __m512i w0 = _mm512_load_si512(w), w1 = _mm512_load_si512(w + 64);
        ahead.fetch((size_t)(w - panel));
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
          const __m512i v = spread(a + (size_t)r * padded + 4 * k);
          c[r][0] = dot8(c[r][0], w0, v);
          c[r][1] = dot8(c[r][1], w1, v);
        }
      }
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; r++) {
        const __m512 s = _mm512_set1_ps(scales[(size_t)r * groups + group]);
        sum[r][0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(c[r][0]), s, sum[r][0]);
        sum[r][1] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(c[r][1]), s, sum[r][1]);
      }
    }
    const float *by = (const float *)(panel + (size_t)padded * BATON_PANEL);
    const __m512 by0 = _mm512_load_ps(by), by1 = _mm512_load_ps(by + 16);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
      deliver(target, first + r, column, _mm512_mul_ps(sum[r][0], by0), _mm512_mul_ps(sum[r][1], by1));
  }
};

}  // namespace

void multiply_int8(const Activations &x, const void *panel, int in, int first, int rows, int column,
                   const Target &target) {
  in_tiles<Tile, 12>(first, rows, panel, panel_bytes(BATON_INT8, in), x, (const uint8_t *)panel, in, column, target);
}

}  // namespace baton
