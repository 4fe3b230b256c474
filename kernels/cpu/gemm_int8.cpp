// int8 weights with a scale a column, int8 activations in groups of 64: w = scale * (u - 128).
#include "gemm.h"

namespace baton {
namespace {

constexpr int GROUP = 64;

template <int ROWS>
struct Tile {
  static void run(int first, const Activations &x, const uint8_t *panel, int in, int column, const Target &target) {
    const int padded = padded_of(BATON_INT8, in), groups = padded / GROUP;
    const int8_t *values = x.quantised.values + (size_t)first * padded;
    const float *scales = x.quantised.scales + (size_t)first * groups;
    const int32_t *sums = x.quantised.sums + (size_t)first * groups;
    // Beside as many integer sums there are no registers for these.
    alignas(64) float sum[ROWS][2][16];
    for (int group = 0; group < groups; group++) {
      __m512i c[ROWS][2];
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; r++) c[r][0] = c[r][1] = _mm512_set1_epi32(-128 * sums[(size_t)r * groups + group]);
      const uint8_t *w = panel + (size_t)group * GROUP * BATON_PANEL;
      const int8_t *a = values + group * GROUP;
      for (int k = 0; k < GROUP / 4; k++, w += 128) {
        const __m512i w0 = _mm512_load_si512(w), w1 = _mm512_load_si512(w + 64);
        prefetch(w + AHEAD_BYTES);
        prefetch(w + AHEAD_BYTES + 64);
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
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
          const __m512 v = _mm512_cvtepi32_ps(c[r][j]);
          const __m512 before = group ? _mm512_load_ps(sum[r][j]) : _mm512_setzero_ps();
          _mm512_store_ps(sum[r][j], _mm512_fmadd_ps(v, s, before));
        }
      }
    }
    const float *by = (const float *)(panel + (size_t)padded * BATON_PANEL);
    const __m512 by0 = _mm512_load_ps(by), by1 = _mm512_load_ps(by + 16);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
      deliver(target, first + r, column, _mm512_mul_ps(_mm512_load_ps(sum[r][0]), by0),
              _mm512_mul_ps(_mm512_load_ps(sum[r][1]), by1));
  }
};

}  // namespace

void multiply_int8(const Activations &x, const void *panel, int in, int first, int rows, int column,
                   const Target &target) {
  in_tiles<Tile, 12>(first, rows, x, (const uint8_t *)panel, in, column, target);
}

}  // namespace baton
