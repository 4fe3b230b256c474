// What this machine can do at most, measured: the lines that a step's time is held against.
#include <algorithm>

#include "abi.h"
#include "simd.h"
#include "team.h"
#include "watch.h"

using namespace baton;

constexpr int ROUNDS = 5;  // of which the best counts

extern "C" double baton_probe_reads(void *opened, const void *bytes, uint64_t size) {
  constexpr long AT_ONCE = 256;
  Team &team = *static_cast<Team *>(opened);
  const long count = (long)size / AT_ONCE;
  double best_s = 1e9;
  for (int round = 0; round < ROUNDS; round++) {
    const double began = seconds_now();
    team.run([&](int me) {
      const Range mine(count, me, team.size());
      __m512i sum[4] = {};
      for (long i = mine.begin; i < mine.end; i++)
        for (long part = 0; part < 4; part++) {
          const char *at = (const char *)bytes + i * AT_ONCE + part * 64;
          prefetch(at + 2048);
          sum[part] = _mm512_add_epi32(sum[part], _mm512_load_si512(at));
        }
      asm volatile("" ::"v"(sum[0]), "v"(sum[1]), "v"(sum[2]), "v"(sum[3]));
    });
    best_s = std::min(best_s, seconds_now() - began);
  }
  return (double)(count * AT_ONCE) / best_s;
}

template <typename Sum, typename One>
static double sums_per_second(double of_one, One one) {
  constexpr long TIMES = 2000000;
  constexpr int CHAINS = 12;
  double best_s = 1e9;
  __m512i a = _mm512_set1_epi32(0x3f803f80), b = _mm512_set1_epi32(0x3f003f00);
  for (int round = 0; round < ROUNDS; round++) {
    const double began = seconds_now();
    Sum sum[CHAINS] = {};
    for (long i = 0; i < TIMES; i++) {
#pragma GCC unroll 12
      for (int chain = 0; chain < CHAINS; chain++) sum[chain] = one(sum[chain], a, b);
      asm volatile("" : "+v"(a), "+v"(b));
    }
    for (int chain = 0; chain < CHAINS; chain++) asm volatile("" ::"v"(sum[chain]));
    best_s = std::min(best_s, seconds_now() - began);
  }
  return TIMES * CHAINS * of_one / best_s;
}

extern "C" double baton_probe_sums(int32_t int8) {
  if (int8) return sums_per_second<__m512i>(128, [](__m512i c, __m512i a, __m512i b) { return dot8(c, a, b); });
  return sums_per_second<__m512>(64, [](__m512 c, __m512i a, __m512i b) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));  // the intrinsic's chains, all alike, become one
    return c;
  });
}
