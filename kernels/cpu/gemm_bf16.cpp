// bfloat16 weights and activations, float32 sums: VDPBF16PS takes two inputs of 16 columns at once.
#include "gemm.h"

namespace baton {
namespace {

template <int ROWS>
struct Tile {
  static void run(int first, const Ahead &ahead, const Activations &x, const bf16 *panel, int in, int column, const Target &target) {
    const bf16 *a = x.plain + (size_t)first * in;
    __m512 sum[ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (int pair = 0; pair < in / 2; pair++) {
      const bf16 *w = panel + pair * 64;
      const __m512i w0 = _mm512_load_si512(w), w1 = _mm512_load_si512(w + 32);
      ahead.fetch((size_t)pair * 128);
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; r++) {
        const __m512i v = spread(a + (size_t)r * in + 2 * pair);
        sum[r][0] = dot(sum[r][0], v, w0);
        sum[r][1] = dot(sum[r][1], v, w1);
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) deliver(target, first + r, column, sum[r][0], sum[r][1]);
  }
};

}  // namespace

void multiply_bf16(const Activations &x, const void *panel, int in, int first, int rows, int column,
                   const Target &target) {
  in_tiles<Tile, 12>(first, rows, panel, panel_bytes(BATON_BF16, in), x, (const bf16 *)panel, in, column, target);
}

}  // namespace baton
