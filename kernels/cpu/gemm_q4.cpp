// GGUF's Q4_1 as it comes (and Q4_0, whose m is -8 d): weights of 4 bits in groups of 32 inputs, w = d * q + m.
//
// A group's product is d * scale * sum(q a) + m * scale * sum(a), with int8 activations a in the same groups.
#include "gemm.h"

namespace baton {
namespace {

constexpr int GROUP = 32, GROUP_BYTES = GROUP / 2 * BATON_PANEL + BATON_PANEL * 4;

template <int ROWS>
struct Tile {
  static void run(int first, const Ahead &ahead, const Activations &x, const uint8_t *panel, int in, int column, const Target &target) {
    const int groups = in / GROUP;
    const int8_t *values = x.quantised.values + (size_t)first * in;
    const float *scales = x.quantised.scales + (size_t)first * groups;
    const int32_t *sums = x.quantised.sums + (size_t)first * groups;
    const __m512i low = _mm512_set1_epi8(15);
    __m512 sum[ROWS][2];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    const uint8_t *w = panel;
    for (int group = 0; group < groups; group++, w += GROUP_BYTES) {
      for (int i = 0; i < GROUP_BYTES; i += 128) ahead.fetch((size_t)(w - panel) + i);
      const __m256i *scale = (const __m256i *)(w + GROUP / 2 * BATON_PANEL);
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {  // 16 columns each
        __m512i q[8];
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
          const __m512i both = _mm512_load_si512(w + half * 256 + k * 64);
          q[k] = _mm512_and_si512(both, low);
          q[k + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        }
        const __m512 d = _mm512_cvtph_ps(_mm256_load_si256(scale + half));
        const __m512 m = _mm512_cvtph_ps(_mm256_load_si256(scale + 2 + half));
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
          const int8_t *a = values + (size_t)r * in + group * GROUP;
          __m512i c = _mm512_setzero_si512(), e = c;
#pragma GCC unroll 4
          for (int k = 0; k < 4; k++) {
            c = dot8(c, q[k], spread(a + 4 * k));
            e = dot8(e, q[k + 4], spread(a + 4 * (k + 4)));
          }
          const float s = scales[(size_t)r * groups + group];
          const __m512 of_d = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(c, e)), _mm512_set1_ps(s));
          const __m512 of_m = _mm512_set1_ps(s * sums[(size_t)r * groups + group]);
          sum[r][half] = _mm512_fmadd_ps(of_d, d, _mm512_fmadd_ps(of_m, m, sum[r][half]));
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) deliver(target, first + r, column, sum[r][0], sum[r][1]);
  }
};

}  // namespace

void multiply_q4(const Activations &x, const void *panel, int in, int first, int rows, int column,
                 const Target &target) {
  in_tiles<Tile, 4>(first, rows, panel, panel_bytes(BATON_Q4, in), x, (const uint8_t *)panel, in, column, target);
}

}  // namespace baton
