// One panel (32 columns) of a product for up to TILE_ROWS rows; one file a way of storing weights.
//
// A row's sum runs over the inputs in one order however many rows there are, so its result does not depend on them.
#pragma once
#include "abi.h"
#include "quantise.h"
#include "simd.h"

namespace baton {

// What becomes of a panel's sums.
struct Target {
  enum Kind { STORE_F32, STORE_BF16, ADD_F32, SILU_BF16 } kind;  // SILU: 16 gates, 16 ups -> 16 values
  void *out;  // [rows][stride]
  int stride;
};

BATON_INLINE void deliver(const Target &target, int row, int column, __m512 a, __m512 b) {
  const size_t at = (size_t)row * target.stride;
  switch (target.kind) {
    case Target::STORE_F32: {
      float *out = (float *)target.out + at + column;
      _mm512_storeu_ps(out, a);
      _mm512_storeu_ps(out + 16, b);
      break;
    }
    case Target::STORE_BF16: {
      bf16 *out = (bf16 *)target.out + at + column;
      store_bf16(out, a);
      store_bf16(out + 16, b);
      break;
    }
    case Target::ADD_F32: {
      float *out = (float *)target.out + at + column;
      _mm512_storeu_ps(out, _mm512_add_ps(_mm512_loadu_ps(out), a));
      _mm512_storeu_ps(out + 16, _mm512_add_ps(_mm512_loadu_ps(out + 16), b));
      break;
    }
    case Target::SILU_BF16:
      store_bf16((bf16 *)target.out + at + column / 2, _mm512_mul_ps(silu(a), b));
  }
}

// Activations of a product: as they are, or quantised as the weights' kind asks.
struct Activations {
  const bf16 *plain;  // [rows][in]
  Quantised quantised;
};

// Of int8 activations: inputs in a group, and a row's inputs padded to whole groups.
constexpr int group_of(int kind) { return kind == BATON_INT8 ? 64 : 32; }
constexpr int padded_of(int kind, int in) { return (int)ceil_div(in, group_of(kind)) * group_of(kind); }
constexpr size_t panel_bytes(int kind, int in) {
  switch (kind) {
    case BATON_BF16: return (size_t)in * BATON_PANEL * 2;
    case BATON_INT8: return (size_t)padded_of(kind, in) * BATON_PANEL + BATON_PANEL * 4;
    case BATON_Q8: return (size_t)in / 32 * (32 * BATON_PANEL + BATON_PANEL * 2);
    default: return (size_t)in / 32 * (16 * BATON_PANEL + BATON_PANEL * 4);
  }
}

// What a tile fetches ahead of use, along its own way through the panel. Weights are read once a step, in one long stream:
// a panel's only tile fetches what it needs itself a little later, and where there are several each fetches its part of the
// next panel, so that memory is read all the time.
struct Ahead {
  static constexpr int NEAR_BYTES = 4096;
  const char *base;
  int tiles;

  Ahead(const void *panel, size_t bytes, int tile, int tiles)
      : base((const char *)panel + (tiles == 1 ? NEAR_BYTES : bytes + bytes * tile / tiles)), tiles(tiles) {}

  // When 128 bytes at `offset` of the panel are used.
  void fetch(size_t offset) const {
    const char *at = base + offset / (unsigned)tiles;
    prefetch(at);
    prefetch(at + 64);
  }
};

void multiply_bf16(const Activations &, const void *panel, int in, int first, int rows, int column, const Target &);
void multiply_int8(const Activations &, const void *panel, int in, int first, int rows, int column, const Target &);
void multiply_q8(const Activations &, const void *panel, int in, int first, int rows, int column, const Target &);
void multiply_q4(const Activations &, const void *panel, int in, int first, int rows, int column, const Target &);

// Splits `rows` from `first` into even runs of at most MOST and calls F<run>::run(first of the run, what it fetches ahead,
// args...).
template <template <int> class F, int MOST, typename... Args>
BATON_INLINE void in_tiles(int first, int rows, const void *panel, size_t bytes, const Args &...args) {
  const int tiles = (int)ceil_div(rows, MOST);
  for (int t = 0; t < tiles; t++) {
    const int begin = first + rows * t / tiles, end = first + rows * (t + 1) / tiles;
    const Ahead ahead(panel, bytes, t, tiles);
    switch (end - begin) {
      case 1: F<1>::run(begin, ahead, args...); break;
      case 2: F<2>::run(begin, ahead, args...); break;
      case 3: F<3>::run(begin, ahead, args...); break;
      case 4: F<4>::run(begin, ahead, args...); break;
      case 5: F<MOST < 5 ? 1 : 5>::run(begin, ahead, args...); break;
      case 6: F<MOST < 6 ? 1 : 6>::run(begin, ahead, args...); break;
      case 7: F<MOST < 7 ? 1 : 7>::run(begin, ahead, args...); break;
      case 8: F<MOST < 8 ? 1 : 8>::run(begin, ahead, args...); break;
      case 9: F<MOST < 9 ? 1 : 9>::run(begin, ahead, args...); break;
      case 10: F<MOST < 10 ? 1 : 10>::run(begin, ahead, args...); break;
      case 11: F<MOST < 11 ? 1 : 11>::run(begin, ahead, args...); break;
      default: F<MOST < 12 ? 1 : 12>::run(begin, ahead, args...);
    }
  }
}

}  // namespace baton
