#include "attention.h"

#include <math.h>

namespace baton {
namespace {

constexpr int BLOCK = BATON_BLOCK_TOKENS;
constexpr int TILE_BLOCKS = ATTENTION_TILE / BLOCK;
constexpr int KEYS_AHEAD = 2;  // blocks

// A tile's blocks: `count` of them, from the sequence's block number `first` on.
struct Tile {
  const bf16 *keys, *values;
  const int32_t *table;
  size_t stride;
  int count;
  Upcoming next;

  const bf16 *key(int block) const { return keys + table[block] * stride; }
  const bf16 *value(int block) const { return values + table[block] * stride; }
};

// Scores of ROWS rows and BLOCKS neighbouring blocks: one vector holds the 16 tokens of a block.
template <int ROWS, int BLOCKS>
BATON_INLINE void score_blocks(const bf16 *const *query, const Tile &tile, int block, int pairs, __m512 scale,
                               float (*scores)[ATTENTION_TILE]) {
  // Keys of some blocks further on are fetched ahead, and values of these, which are wanted soon.
  const bf16 *key[BLOCKS], *next[BLOCKS], *value[BLOCKS];
  for (int b = 0; b < BLOCKS; b++) {
    key[b] = tile.key(block + b);
    next[b] = tile.key(block + KEYS_AHEAD + b < tile.count ? block + KEYS_AHEAD + b : block + b);
    value[b] = tile.value(block + b);
  }
  __m512 sum[ROWS][BLOCKS];
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (int b = 0; b < BLOCKS; b++) sum[r][b] = _mm512_setzero_ps();
  for (int pair = 0; pair < pairs; pair++) {
    __m512i k[BLOCKS];
#pragma GCC unroll 2
    for (int b = 0; b < BLOCKS; b++) {
      k[b] = _mm512_load_si512(key[b] + pair * 32);
      prefetch(next[b] + pair * 32);
      prefetch(value[b] + pair * 32);
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
      const __m512i q = spread(query[r] + 2 * pair);
#pragma GCC unroll 2
      for (int b = 0; b < BLOCKS; b++) sum[r][b] = dot(sum[r][b], q, k[b]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (int b = 0; b < BLOCKS; b++)
      _mm512_store_ps(scores[r] + (block + b) * BLOCK, _mm512_mul_ps(sum[r][b], scale));
}

template <int ROWS>
void score(const bf16 *const *query, const Tile &tile, int pairs, __m512 scale, float (*scores)[ATTENTION_TILE]) {
  int block = 0;
  for (; block + 1 < tile.count; block += 2) score_blocks<ROWS, 2>(query, tile, block, pairs, scale, scores);
  if (block < tile.count) score_blocks<ROWS, 1>(query, tile, block, pairs, scale, scores);
}

// Calls f<R>(first) for runs of rows whose lengths R are instantiated and at most `most`.
template <template <int> class F, int MOST, typename... Args>
void in_runs(int rows, Args &&...args) {
  for (int at = 0; at < rows;) {
    const int left = rows - at;
    if (MOST >= 12 && left >= 12) F<MOST >= 12 ? 12 : 1>::run(at, args...), at += 12;
    else if (MOST >= 8 && left >= 8) F<MOST >= 8 ? 8 : 1>::run(at, args...), at += 8;
    else if (MOST >= 6 && left >= 6) F<MOST >= 6 ? 6 : 1>::run(at, args...), at += 6;
    else if (MOST >= 4 && left >= 4) F<MOST >= 4 ? 4 : 1>::run(at, args...), at += 4;
    else if (MOST >= 3 && left >= 3) F<MOST >= 3 ? 3 : 1>::run(at, args...), at += 3;
    else if (MOST >= 2 && left >= 2) F<MOST >= 2 ? 2 : 1>::run(at, args...), at += 2;
    else F<1>::run(at, args...), at += 1;
  }
}

template <int R>
struct Score {
  static void run(int at, const AttentionRows &rows, const Tile &tile, int pairs, __m512 scale, AttentionScratch &s) {
    score<R>(rows.query + at, tile, pairs, scale, s.scores + at);
  }
};

// Turns a row's scores (to the base of 2) into weights, of which only the first `seen` are not zero.
void weigh(int row, int seen, int blocks, AttentionScratch &s) {
  const float *scores = s.scores[row];
  bf16 *weights = s.weights[row];
  const int whole = seen / BLOCK, rest = seen % BLOCK;
  const __mmask16 some = (__mmask16)((1u << rest) - 1);
  __m512 peaks = _mm512_set1_ps(s.peak[row]);
  for (int i = 0; i < whole; i++) peaks = _mm512_max_ps(peaks, _mm512_load_ps(scores + i * BLOCK));
  if (rest) peaks = _mm512_mask_max_ps(peaks, some, peaks, _mm512_load_ps(scores + whole * BLOCK));
  const float peak = _mm512_reduce_max_ps(peaks);
  const __m512 at = _mm512_set1_ps(peak);
  __m512 sum = _mm512_setzero_ps();
  for (int i = 0; i < whole; i++) {
    const __m512 e = exp2(_mm512_sub_ps(_mm512_load_ps(scores + i * BLOCK), at));
    sum = _mm512_add_ps(sum, e);
    store_bf16(weights + i * BLOCK, e);
  }
  int i = whole;
  if (rest) {
    const __m512 e = _mm512_maskz_mov_ps(some, exp2(_mm512_sub_ps(_mm512_load_ps(scores + i * BLOCK), at)));
    sum = _mm512_add_ps(sum, e);
    store_bf16(weights + i * BLOCK, e);
    i++;
  }
  for (; i < blocks; i++) store_bf16(weights + i * BLOCK, _mm512_setzero_ps());
  s.fade[row] = seen ? exp2f(s.peak[row] - peak) : 1.f;
  s.total[row] = s.total[row] * s.fade[row] + _mm512_reduce_add_ps(sum);
  s.peak[row] = seen ? peak : s.peak[row];
}

// Adds the tile's weighted values to ROWS rows' sums; COLUMNS vectors make a head. Values are at hand by now, so the first
// rows fetch the keys that come next: as many lines a block as there are of values.
template <int COLUMNS, int ROWS>
void add_values(int at, const Tile &tile, AttentionScratch &s) {
  __m512 sum[ROWS][COLUMNS];
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; r++) {
    const __m512 fade = _mm512_set1_ps(s.fade[at + r]);
#pragma GCC unroll 16
    for (int c = 0; c < COLUMNS; c++) sum[r][c] = _mm512_mul_ps(_mm512_load_ps(s.sums[at + r] + c * 16), fade);
  }
  for (int b = 0; b < tile.count; b++) {
    const bf16 *value = tile.value(b), *next = value;
    if (at == 0 && b < tile.next.count) next = tile.next.keys + tile.next.table[b] * tile.stride;
    for (int pair = 0; pair < BLOCK / 2; pair++, value += COLUMNS * 32, next += COLUMNS * 32) {
      __m512i weight[ROWS];
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; r++) weight[r] = spread(s.weights[at + r] + b * BLOCK + 2 * pair);
#pragma GCC unroll 16
      for (int c = 0; c < COLUMNS; c++) {
        const __m512i v = _mm512_load_si512(value + c * 32);
        prefetch(next + c * 32);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) sum[r][c] = dot(sum[r][c], weight[r], v);
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
    for (int c = 0; c < COLUMNS; c++) _mm512_store_ps(s.sums[at + r] + c * 16, sum[r][c]);
}

template <int COLUMNS>
struct Values {
  template <int R>
  struct Add {
    static void run(int at, const Tile &tile, AttentionScratch &s) { add_values<COLUMNS, R>(at, tile, s); }
  };
  // As many rows as keep their sums in 24 registers.
  static void add(int rows, const Tile &tile, AttentionScratch &s) {
    in_runs<Add, 24 / COLUMNS == 0 ? 1 : 24 / COLUMNS>(rows, tile, s);
  }
};

}  // namespace

void attend(const AttentionRows &rows, const bf16 *keys, const bf16 *values, const int32_t *table, size_t stride,
            int head_dim, const Upcoming &upcoming, AttentionScratch &s) {
  const __m512 scale = _mm512_set1_ps(LOG2_E / sqrtf((float)head_dim));
  int longest = 0;
  for (int r = 0; r < rows.count; r++) {
    if (rows.seen[r] > longest) longest = rows.seen[r];
    s.peak[r] = -INFINITY;
    s.total[r] = 0;
    for (int i = 0; i < head_dim; i += 16) _mm512_store_ps(s.sums[r] + i, _mm512_setzero_ps());
  }
  const int blocks = (int)ceil_div(longest, BLOCK);
  for (int first = 0; first < blocks; first += TILE_BLOCKS) {
    const int count = blocks - first < TILE_BLOCKS ? blocks - first : TILE_BLOCKS;
    const int after = first + count, more = blocks - after < TILE_BLOCKS ? blocks - after : TILE_BLOCKS;
    const Upcoming next = more > 0 ? Upcoming{keys, table + after, more} : upcoming;
    const Tile tile{keys, values, table + first, stride, count, next};
    in_runs<Score, 12>(rows.count, rows, tile, head_dim / 2, scale, s);
    for (int r = 0; r < rows.count; r++) {
      const int seen = rows.seen[r] - first * BLOCK;
      weigh(r, seen < 0 ? 0 : seen > count * BLOCK ? count * BLOCK : seen, count, s);
    }
    switch (head_dim) {
      case 64: Values<4>::add(rows.count, tile, s); break;
      case 80: Values<5>::add(rows.count, tile, s); break;
      case 128: Values<8>::add(rows.count, tile, s); break;
      default: Values<16>::add(rows.count, tile, s);
    }
  }
  for (int r = 0; r < rows.count; r++) {
    const __m512 share = _mm512_set1_ps(1.f / s.total[r]);
    for (int i = 0; i < head_dim; i += 16)
      store_bf16(rows.out[r] + i, _mm512_mul_ps(_mm512_load_ps(s.sums[r] + i), share));
  }
}

}  // namespace baton
