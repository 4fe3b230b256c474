// Choosing tokens from logits (workers/sampler.py: choose): greedy, or by inversion of a distribution that is cut.
//
// The logits' maximum, sum and log-normaliser are found while the logits are still in the cache. A nucleus is looked for
// among the likeliest tokens alone; the whole vocabulary is sorted only where the nucleus is that large.
#pragma once
#include <math.h>

#include <algorithm>

#include "abi.h"
#include "simd.h"

namespace baton {

// What is known of a range of a row's logits: `sum` of exp(logit - peak), and whether all were finite.
struct Seen {
  float peak = -INFINITY;
  int32_t index = 0;  // the first at the peak
  double sum = 0;
  bool finite = true;

  // Adds the range that follows this one; an empty range changes nothing.
  void add(const Seen &next) {
    finite &= next.finite;
    if (next.sum == 0) return;
    if (next.peak > peak) {
      sum = sum * std::exp((double)peak - next.peak) + next.sum;
      peak = next.peak;
      index = next.index;
    } else {
      sum += next.sum * std::exp((double)next.peak - peak);
    }
  }
};

// Of logits [begin, end) of a row.
static inline Seen see(const float *logits, long begin, long end) {
  Seen seen;
  if (begin >= end) return seen;
  const auto mask_at = [&](long i) { return end - i >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << (end - i)) - 1); };
  const __m512 none = _mm512_set1_ps(-INFINITY);
  __m512 peaks = none, raw = _mm512_setzero_ps();
  __m512i where = _mm512_set1_epi32((int)begin), at = _mm512_add_epi32(
      _mm512_set1_epi32((int)begin), _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
  for (long i = begin; i < end; i += 16) {
    const __m512 v = _mm512_mask_loadu_ps(none, mask_at(i), logits + i);
    raw = _mm512_mask_add_ps(raw, mask_at(i), raw, v);
    const __mmask16 higher = _mm512_cmp_ps_mask(v, peaks, _CMP_GT_OQ);
    peaks = _mm512_mask_mov_ps(peaks, higher, v);
    where = _mm512_mask_mov_epi32(where, higher, at);
    at = _mm512_add_epi32(at, _mm512_set1_epi32(16));
  }
  seen.peak = _mm512_reduce_max_ps(peaks);
  const __m512 peak = _mm512_set1_ps(seen.peak);
  seen.index = _mm512_mask_reduce_min_epi32(_mm512_cmp_ps_mask(peaks, peak, _CMP_EQ_OQ), where);
  __m512 sum = _mm512_setzero_ps();
  for (long i = begin; i < end; i += 16)
    sum = _mm512_mask_add_ps(sum, mask_at(i), sum, exp(_mm512_sub_ps(_mm512_maskz_loadu_ps(mask_at(i), logits + i), peak)));
  seen.sum = _mm512_reduce_add_ps(sum);
  seen.finite = std::isfinite(_mm512_reduce_add_ps(raw)) && std::isfinite(seen.sum);
  return seen;
}

struct DrawRoom {
  float *weights;  // [vocab]
  float *likely;   // [vocab]
};

constexpr long MASS_CHUNK = 1024;

// The least weight kept: of the best top_k that are at least min_p, those that make up top_p of their mass.
static inline float least_kept(const DrawRoom &room, long vocab, const BatonDraw &draw, double whole) {
  const long most = draw.top_k > 0 && draw.top_k < vocab ? draw.top_k : vocab;
  const bool open = most == vocab;  // no top-k: the share is of all
  for (float floor : {1.f / 4096, 1.f / 16777216, 0.f}) {
    const __m512 least = _mm512_set1_ps(std::max(floor, draw.min_p));
    long count = 0;
    for (long i = 0; i < vocab; i += 16) {
      const __mmask16 there = vocab - i >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << (vocab - i)) - 1);
      const __m512 w = _mm512_maskz_loadu_ps(there, room.weights + i);
      const __mmask16 likely = _mm512_mask_cmp_ps_mask(there, w, least, _CMP_GE_OQ);
      _mm512_mask_compressstoreu_ps(room.likely + count, likely, w);
      count += __builtin_popcount(likely);
    }
    const bool all = floor == 0.f || draw.min_p >= floor;  // none that may be kept is below the floor
    if (!all && !open && count < most) continue;
    if (!open && count > most)
      std::nth_element(room.likely, room.likely + most, room.likely + count, [](float a, float b) { return a > b; });
    count = std::min(count, most);
    std::sort(room.likely, room.likely + count, [](float a, float b) { return a > b; });
    if (draw.top_p >= 1.f) {
      if (all || !open) return room.likely[count - 1];
      return draw.min_p;  // nothing cuts but min-p
    }
    double mass = whole;
    if (!open) {
      mass = 0;
      for (long i = 0; i < count; i++) mass += room.likely[i];
    }
    double through = 0;
    long kept = 0;
    while (kept < count && (kept == 0 || through < draw.top_p * mass)) through += room.likely[kept++];
    if (all || kept < count || through >= draw.top_p * mass) return room.likely[kept - 1];
  }
  return 0.f;
}

// One token of the row's distribution under the draw's temperature and cuts, by its own random number.
static inline int32_t draw_token(const float *logits, long vocab, float peak, const BatonDraw &draw, const DrawRoom &room) {
  const __m512 top = _mm512_set1_ps(peak), by = _mm512_set1_ps(1.f / draw.temperature);
  double whole = 0;
  for (long begin = 0; begin < vocab; begin += MASS_CHUNK) {
    const long end = std::min(begin + MASS_CHUNK, vocab);
    __m512 sum = _mm512_setzero_ps();
    for (long i = begin; i < end; i += 16) {
      const __mmask16 there = end - i >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << (end - i)) - 1);
      const __m512 w = exp(_mm512_mul_ps(_mm512_sub_ps(_mm512_maskz_loadu_ps(there, logits + i), top), by));
      _mm512_mask_storeu_ps(room.weights + i, there, w);
      sum = _mm512_mask_add_ps(sum, _mm512_mask_cmp_ps_mask(there, w, _mm512_set1_ps(draw.min_p), _CMP_GE_OQ), sum, w);
    }
    whole += _mm512_reduce_add_ps(sum);
  }
  float floor = draw.min_p;
  const bool cut = draw.top_p < 1.f || (draw.top_k > 0 && draw.top_k < vocab);
  if (cut) floor = std::max(floor, least_kept(room, vocab, draw, whole));
  // Mass by chunks first, so that only the chunk that is hit is gone through token by token.
  const __m512 least = _mm512_set1_ps(floor);
  double *masses = (double *)room.likely, mass = 0;
  const long chunks = ceil_div(vocab, MASS_CHUNK);
  long final = 0;  // the last chunk that keeps anything
  for (long chunk = 0; chunk < chunks; chunk++) {
    const long end = std::min((chunk + 1) * MASS_CHUNK, vocab);
    __m512d low = _mm512_setzero_pd(), high = low;
    for (long i = chunk * MASS_CHUNK; i < end; i += 16) {
      const __mmask16 there = end - i >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << (end - i)) - 1);
      const __m512 w = _mm512_maskz_loadu_ps(there, room.weights + i);
      const __m512 kept = _mm512_maskz_mov_ps(_mm512_mask_cmp_ps_mask(there, w, least, _CMP_GE_OQ), w);
      low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(kept)));
      high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(kept, 1)));
    }
    mass += masses[chunk] = _mm512_reduce_add_pd(_mm512_add_pd(low, high));
    if (masses[chunk] > 0) final = chunk;
  }
  double left = draw.number * mass;
  long chunk = 0;
  while (chunk < final && left >= masses[chunk]) left -= masses[chunk++];
  int32_t last = 0;
  for (long i = chunk * MASS_CHUNK; i < vocab; i++) {
    if (!(room.weights[i] >= floor) || room.weights[i] == 0.f) continue;
    last = (int32_t)i;
    if (left < room.weights[i]) break;
    left -= room.weights[i];
  }
  return last;
}

static inline BatonChoice choose(const Seen &seen, const float *logits, long vocab, const BatonDraw &draw,
                                 const DrawRoom &room) {
  const bool finite = seen.finite && std::isfinite(seen.peak);
  const float normaliser = (float)(seen.peak + std::log(seen.sum));
  if (!finite) return {0, 0.f, normaliser, 0};
  const int32_t token = draw.temperature > 0 ? draw_token(logits, vocab, seen.peak, draw, room) : seen.index;
  return {token, logits[token] - normaliser, normaliser, 1};
}

}  // namespace baton
