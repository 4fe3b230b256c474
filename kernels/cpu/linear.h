// A product of all rows with a matrix of any kind, shared out among a team.
#pragma once
#include "gemm.h"
#include "team.h"

namespace baton {

// Room for quantised activations of `rows` rows of at most `width` inputs.
struct QuantisedRoom {
  static constexpr int GROUP_MIN = 32;
  static size_t values_bytes(long rows, long width) { return (size_t)rows * ceil_div(width, 64) * 64; }
  static size_t groups_bytes(long rows, long width) {
    return (size_t)ceil_div(rows * ceil_div(width, 64) * 64 / GROUP_MIN * 4, 64) * 64;
  }
};

// Quantises rows [begin, end) as the matrix wants its activations; nothing to do for bfloat16.
BATON_INLINE void quantise_rows(const BatonMatrix &matrix, const Activations &x, long begin, long end) {
  if (matrix.kind == BATON_BF16) return;
  const int padded = padded_of(matrix.kind, matrix.in), groups = padded / group_of(matrix.kind);
  for (long row = begin; row < end; row++) {
    const bf16 *from = x.plain + (size_t)row * matrix.in;
    int8_t *values = x.quantised.values + (size_t)row * padded;
    float *scales = x.quantised.scales + (size_t)row * groups;
    int32_t *sums = x.quantised.sums + (size_t)row * groups;
    if (matrix.kind == BATON_INT8) quantise_row<64>(from, matrix.in, padded, values, scales, sums);
    else quantise_row<32>(from, matrix.in, padded, values, scales, sums);
  }
}

BATON_INLINE void multiply_panel(const BatonMatrix &matrix, const Activations &x, long panel, int first, int rows,
                                 const Target &target) {
  const void *at = (const char *)matrix.panels + panel * panel_bytes(matrix.kind, matrix.in);
  const int column = (int)panel * BATON_PANEL;
  switch (matrix.kind) {
    case BATON_BF16: multiply_bf16(x, at, matrix.in, first, rows, column, target); break;
    case BATON_INT8: multiply_int8(x, at, matrix.in, first, rows, column, target); break;
    case BATON_Q8: multiply_q8(x, at, matrix.in, first, rows, column, target); break;
    default: multiply_q4(x, at, matrix.in, first, rows, column, target);
  }
}

constexpr long PANELS_AT_ONCE = 4;

// Rows whose activations stay in the second-level cache while panels pass by.
constexpr int rows_at_once(int in) { return in > 1000 ? 96 : 192; }

// This member's share. Few rows: a contiguous range of panels, so that weights are one stream a member. Many rows: blocks
// of rows by a few panels.
BATON_INLINE void multiply(const BatonMatrix &matrix, const Activations &x, int rows, const Target &target, int member,
                           int members) {
  const long panels = ceil_div(matrix.out, BATON_PANEL), blocks = ceil_div(rows, rows_at_once(matrix.in));
  if (blocks <= 1) {
    const Range mine(panels, member, members);
    for (long panel = mine.begin; panel < mine.end; panel++) multiply_panel(matrix, x, panel, 0, rows, target);
    return;
  }
  const long groups = ceil_div(panels, PANELS_AT_ONCE);
  const Range mine(blocks * groups, member, members);
  for (long unit = mine.begin; unit < mine.end; unit++) {
    const Range block(rows, (int)(unit / groups), (int)blocks);
    const long first = unit % groups * PANELS_AT_ONCE;
    for (long panel = first; panel < first + PANELS_AT_ONCE && panel < panels; panel++)
      multiply_panel(matrix, x, panel, (int)block.begin, (int)(block.end - block.begin), target);
  }
}

}  // namespace baton
