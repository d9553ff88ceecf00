// The lanes of the variant being compiled, and what is written in them once for all variants.
#pragma once

#include <cstring>

#if defined(RAMET_AMX)
#define RAMET_ARCH amx
#define RAMET_BF16_DOT
#include "simd_avx512.h"
#elif defined(RAMET_AVX512BF16)
#define RAMET_ARCH avx512bf16
#define RAMET_BF16_DOT
#include "simd_avx512.h"
#elif defined(RAMET_AVX512)
#define RAMET_ARCH avx512
#include "simd_avx512.h"
#elif defined(RAMET_AVX2)
#define RAMET_ARCH avx2
#include "simd_avx2.h"
#else
#define RAMET_ARCH portable
#include "simd_portable.h"
#endif

namespace ramet {
namespace RAMET_ARCH {

// e^x to about 2 ulp; 0 below -87.3 (and for -inf), NaN for NaN.
inline vf exp(vf x) {
  const vf n = round(mul(max(set1(-87.3f), min(set1(88.3f), x)), set1(1.44269504088896341f)));
  const vf bounded = max(set1(-87.3f), min(set1(88.3f), x));  // both keep a NaN in x: it is their second operand
  vf r = fma(n, set1(-0.693359375f), bounded);
  r = fma(n, set1(2.12194440e-4f), r);
  vf p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(mul(p, r), r, add(r, set1(1.0f)));
  return scale2(p, n);
}

inline float exp_one(float x) {
  float lane[W];
  store(lane, exp(set1(x)));
  return lane[0];
}

// To nearest, ties to even; a NaN stays one.
inline uint16_t bf16_of_f32(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  return static_cast<uint16_t>(nan ? (bits >> 16) | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The first `count` lanes of memory that may end there.
inline vf load_some(const float* p, int64_t count, float fill = 0.0f) {
  if (count >= W) return load(p);
  float lane[W];
  for (int i = 0; i < W; ++i) lane[i] = i < count ? p[i] : fill;
  return load(lane);
}
inline void store_some(float* p, vf x, int64_t count) {
  if (count >= W) return store(p, x);
  float lane[W];
  store(lane, x);
  for (int64_t i = 0; i < count; ++i) p[i] = lane[i];
}

}  // namespace RAMET_ARCH
}  // namespace ramet
