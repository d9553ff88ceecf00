// Sixteen lanes: AVX-512 F, BW, DQ, VL and VNNI; with bfloat16 dot products for the two variants that have them.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "api.h"

namespace ramet {
namespace RAMET_ARCH {

constexpr int W = 16;
using vf = __m512;

inline vf zero() { return _mm512_setzero_ps(); }
inline vf set1(float x) { return _mm512_set1_ps(x); }
inline vf load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, vf x) { _mm512_storeu_ps(p, x); }
inline vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
inline vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
inline vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
inline vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
inline vf max(vf a, vf b) { return _mm512_max_ps(a, b); }  // b where either is NaN
inline vf min(vf a, vf b) { return _mm512_min_ps(a, b); }
inline vf abs(vf a) { return _mm512_abs_ps(a); }
inline vf round(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

// a * 2^n for whole n in [-126, 127].
inline vf scale2(vf a, vf n) {
  __m512i bits = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23);
  return _mm512_mul_ps(a, _mm512_castsi512_ps(bits));
}

inline vf load_bf16(const uint16_t* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline vf load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void store_f16(uint16_t* p, vf x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

inline float reduce_add(vf a) { return _mm512_reduce_add_ps(a); }
inline float reduce_max(vf a) { return _mm512_reduce_max_ps(a); }
inline void reduce8(const vf* a, float* out) {
  for (int i = 0; i < 8; ++i) out[i] = reduce_add(a[i]);
}

inline vf load_int8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

// A group of 32 rounded floats as int8.
inline void store_group(int8_t* p, const vf* x) {
  for (int i = 0; i < 2; ++i)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + i * W), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x[i])));
}

// Dot products of one group of 32: lane c holds output channel c. `w` is the group's packed quants (word j of
// channel c at (j * W + c) * 4), `x[r]` row r's 32 int8. The integer sums are exact.
template <int R, int P>
RAMET_ALWAYS_INLINE void dot_q4(const uint8_t* w, int64_t stride, const int8_t* const* x, const GroupScale* const*, int64_t,
                   vf (*out)[R]) {
  const __m512i nibble = _mm512_set1_epi8(15);
  __m512i sum[P][R];
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) sum[p][r] = _mm512_setzero_si512();
  for (int j = 0; j < 4; ++j) {
    __m512i low[P], high[P];
    for (int p = 0; p < P; ++p) {
      const __m512i both = _mm512_loadu_si512(w + p * stride + j * 64);
      low[p] = _mm512_and_si512(both, nibble);
      high[p] = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
    }
    for (int r = 0; r < R; ++r) {
      const __m512i xl = _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(x[r] + 4 * j));
      const __m512i xh = _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(x[r] + 16 + 4 * j));
      for (int p = 0; p < P; ++p)
        sum[p][r] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(sum[p][r], low[p], xl), high[p], xh);
    }
  }
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) out[p][r] = _mm512_cvtepi32_ps(sum[p][r]);
}

template <int R, int P>
RAMET_ALWAYS_INLINE void dot_q8(const uint8_t* w, int64_t stride, const int8_t* const* x, const GroupScale* const* scales,
                   int64_t group, vf (*out)[R]) {
  const __m512i flip = _mm512_set1_epi8(static_cast<char>(0x80));  // q + 128, unsigned
  __m512i sum[P][R];
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) sum[p][r] = _mm512_set1_epi32(-128 * scales[r][group].sum);
  for (int j = 0; j < 8; ++j) {
    __m512i q[P];
    for (int p = 0; p < P; ++p) q[p] = _mm512_xor_si512(_mm512_loadu_si512(w + p * stride + j * 64), flip);
    for (int r = 0; r < R; ++r) {
      const __m512i xv = _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(x[r] + 4 * j));
      for (int p = 0; p < P; ++p) sum[p][r] = _mm512_dpbusd_epi32(sum[p][r], q[p], xv);
    }
  }
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) out[p][r] = _mm512_cvtepi32_ps(sum[p][r]);
}

inline vf load_int32(const int32_t* p) { return _mm512_cvtepi32_ps(_mm512_loadu_si512(p)); }

#if defined(RAMET_BF16_DOT)
// sum + the two products of a bfloat16 pair, for 16 channels: `w` their pairs, `x` the row's pair.
inline vf dot_bf16(vf sum, const uint8_t* w, const uint16_t* x) {
  int32_t pair;
  std::memcpy(&pair, x, 4);
  const __m512i weights = _mm512_loadu_si512(w), row = _mm512_set1_epi32(pair);
  return _mm512_dpbf16_ps(sum, (__m512bh)(weights), (__m512bh)(row));
}
#endif

}  // namespace RAMET_ARCH
}  // namespace ramet
