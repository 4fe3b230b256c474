// What the library and its caller agree on, in plain C: `kernels/native.py` mirrors these structs field by field.
//
// A *panel* is 32 neighbouring columns of a matrix (outputs), stored so that one load brings what one instruction
// multiplies. Outputs are padded to whole panels with zeros. Every pointer to panels, keys, values and workspace is
// 64-byte aligned.
#pragma once
#include <stdint.h>

enum {
  BATON_BLOCK_TOKENS = 16,  // tokens of a KV block
  BATON_PANEL = 32,         // columns of a panel
  BATON_ABI = 1,            // raised with every change here
};

// How a matrix is stored; `in` is its inputs. int8 activations go in groups along `in`, each with a scale of its own.
enum BatonKind {
  BATON_BF16 = 0,  // [in/2][32][2] bfloat16
  BATON_INT8 = 1,  // [in'/4][32][4] uint8 (weight + 128), then float32 scale[32]; in' a multiple of 64, groups of 64
  BATON_Q8 = 2,    // for each 32 inputs [8][32][4] uint8 (weight + 128), then float16 d[32]; groups of 32
  BATON_Q4 = 3,    // for each 32 inputs [2][4][16][4] bytes of two weights 0..15 (inputs i and i + 16), then float16
                   // d[32] and m[32]: a weight is d * q + m; groups of 32
};

// The parts of a step by which its time is told; each includes what prepares it.
enum BatonPhase { BATON_EMBED, BATON_QKV, BATON_ATTENTION, BATON_OUTPUT, BATON_GATE_UP, BATON_DOWN, BATON_HEAD, BATON_PHASES };

extern "C" {

struct BatonMatrix {
  int32_t kind, out, in, reserved;
  const void *panels;
};

struct BatonLayer {
  const float *attention_norm, *ffn_norm;  // [hidden]
  struct BatonMatrix qkv;                  // [(heads + 2 kv_heads) head_dim, hidden]
  struct BatonMatrix output;               // [hidden, heads head_dim]
  struct BatonMatrix gate_up;              // [2 intermediate, hidden], 16 rows of gate and 16 of up in turn
  struct BatonMatrix down;                 // [hidden, intermediate]
  uint16_t *keys;                          // bfloat16 [blocks][kv_heads][head_dim/2][16 tokens][2]
  uint16_t *values;                        // bfloat16 [blocks][kv_heads][8 pairs of tokens][head_dim][2]
};

struct BatonModel {
  int32_t layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, reserved;
  float rms_eps, rope_scale;
  const uint16_t *embedding;      // bfloat16 [vocab][hidden]
  const float *rope_frequencies;  // [head_dim/2], radians a position
  const float *norm;              // [hidden]
  struct BatonMatrix head;        // [vocab, hidden]
  const struct BatonLayer *layer;
};

// One sequence's tokens in a step: `count` of them from index `first` in the step, at positions from `start` on; its
// block table begins at `table` in the step's `blocks`.
struct BatonPart {
  int32_t first, count, start, table;
};

// How a token is chosen. A temperature of 0 is greedy. `number` is uniform in (0, 1).
struct BatonDraw {
  double number;
  float temperature, top_p, min_p;
  int32_t top_k;  // 0 is off
};

// `finite` is 0 where a logit is not; then token and logprob say nothing.
struct BatonChoice {
  int32_t token;
  float logprob, log_normaliser;
  int32_t finite;
};

struct BatonStep {
  int32_t tokens, parts, wanted;
  int32_t layers;  // how many are computed
  int32_t vocab;   // ids from here on are never chosen
  int32_t reserved;
  const int32_t *ids;             // [tokens]
  const struct BatonPart *part;   // [parts]
  const int32_t *blocks;          // the parts' tables, one after another
  const int32_t *rows;            // [wanted]: the tokens of the step after which one is chosen
  const struct BatonDraw *draw;   // [wanted]
  float *logits;                  // out: [wanted][out of the head, padded]
  struct BatonChoice *choice;     // out: [wanted]
  void *workspace;                // of baton_workspace_bytes; begins with the states, float32 [tokens][hidden]
  double *seconds;                // out: [BATON_PHASES] are added to, or null
};

int32_t baton_abi(void);

// Threads that compute together, this one included; null where none can be had.
void *baton_team_open(int32_t threads);
void baton_team_close(void *team);

uint64_t baton_workspace_bytes(const struct BatonModel *, int32_t tokens, int32_t wanted, int32_t threads);

// Computes a step: keys and values enter the pool, the states the workspace, and a token is chosen after each row.
void baton_step(void *team, const struct BatonModel *, const struct BatonStep *);

// As the end of a step once more, for other rows of the states in the workspace; `tokens` as in that step.
void baton_head(void *team, const struct BatonModel *, const struct BatonStep *);

// Single operations, for tests and measurements. All activations are bfloat16 but for `x`.
void baton_rms_norm(const float *x, const float *weight, uint16_t *out, int32_t rows, int32_t hidden, float eps);
void baton_rope_store(uint16_t *qkv, const struct BatonModel *, const struct BatonStep *, int32_t layer);
void baton_attention(void *team, uint16_t *qkv, uint16_t *out, const struct BatonModel *, const struct BatonStep *,
                     int32_t layer);
void baton_linear(void *team, const struct BatonMatrix *, const uint16_t *x, float *out, int32_t rows,
                  void *workspace);                                           // out [rows][out, padded]
void baton_silu_linear(void *team, const struct BatonMatrix *, const uint16_t *x, uint16_t *out, int32_t rows,
                       void *workspace);                                      // out [rows][out / 2]
uint64_t baton_linear_workspace_bytes(const struct BatonMatrix *, int32_t rows);
// What this machine can do at most: bytes read a second by the team from `size` bytes; and multiplications and additions
// a second of one processor, of bfloat16 or, with `int8`, of bytes.
double baton_probe_reads(void *team, const void *bytes, uint64_t size);
double baton_probe_sums(int32_t int8);
void baton_choose(const float *logits, int32_t rows, int32_t stride, int32_t vocab, const struct BatonDraw *,
                  struct BatonChoice *, float *workspace);                    // workspace [2][vocab + 32]
}
