// Causal grouped-query attention over the paged pool (kernels/reference.py: paged_attention).
//
// Rows are the query heads that share one KV head, of one or several tokens of a sequence. Softmax goes in tiles of
// TILE positions with a running maximum (Milakov and Gimelshein, Online normalizer calculation for softmax, 2018;
// Dao et al., FlashAttention, 2022, section 3.1). Tiles lie at fixed positions and every sum runs in one order, so a
// row's result does not depend on the rows beside it.
#pragma once
#include "abi.h"
#include "simd.h"

namespace baton {

constexpr int ATTENTION_ROWS = 12;
constexpr int ATTENTION_TILE = 512;  // positions; scores and weights of a tile stay in the first-level cache
constexpr int HEAD_DIM_MAX = 256;

struct alignas(64) AttentionScratch {
  float scores[ATTENTION_ROWS][ATTENTION_TILE];
  bf16 weights[ATTENTION_ROWS][ATTENTION_TILE];
  float sums[ATTENTION_ROWS][HEAD_DIM_MAX];
  float peak[ATTENTION_ROWS], total[ATTENTION_ROWS], fade[ATTENTION_ROWS];
};

// Keys that are wanted after these rows, to be fetched meanwhile: `count` blocks of a table, maybe none.
struct Upcoming {
  const bf16 *keys;
  const int32_t *table;
  int count;
};

// Up to ATTENTION_ROWS rows of one sequence and one KV head.
struct AttentionRows {
  int count;
  const bf16 *query[ATTENTION_ROWS];  // [head_dim]
  bf16 *out[ATTENTION_ROWS];          // [head_dim]
  int seen[ATTENTION_ROWS];           // positions a row attends to: its own and all before it
};

// `keys` and `values` point at the KV head within block 0, blocks lie `stride` elements apart.
void attend(const AttentionRows &, const bf16 *keys, const bf16 *values, const int32_t *table, size_t stride,
            int head_dim, const Upcoming &, AttentionScratch &);

}  // namespace baton
