// Eight lanes: AVX2, FMA and F16C.
#pragma once

#include <immintrin.h>

#include "api.h"

namespace ramet {
namespace RAMET_ARCH {

constexpr int W = 8;
using vf = __m256;

inline vf zero() { return _mm256_setzero_ps(); }
inline vf set1(float x) { return _mm256_set1_ps(x); }
inline vf load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, vf x) { _mm256_storeu_ps(p, x); }
inline vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
inline vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
inline vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
inline vf div(vf a, vf b) { return _mm256_div_ps(a, b); }
inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
inline vf max(vf a, vf b) { return _mm256_max_ps(a, b); }  // b where either is NaN
inline vf min(vf a, vf b) { return _mm256_min_ps(a, b); }
inline vf abs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline vf round(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

// a * 2^n for whole n in [-126, 127].
inline vf scale2(vf a, vf n) {
  __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(a, _mm256_castsi256_ps(bits));
}

inline vf load_bf16(const uint16_t* p) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline vf load_f16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline void store_f16(uint16_t* p, vf x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// ((0+1)+(2+3)) + ((4+5)+(6+7)) of each of eight vectors.
inline void reduce8(const vf* a, float* out) {
  vf low = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
  vf high = _mm256_hadd_ps(_mm256_hadd_ps(a[4], a[5]), _mm256_hadd_ps(a[6], a[7]));
  vf left = _mm256_permute2f128_ps(low, high, 0x20), right = _mm256_permute2f128_ps(low, high, 0x31);
  _mm256_storeu_ps(out, _mm256_add_ps(left, right));
}
inline float reduce_add(vf a) {
  __m256 pairs = _mm256_hadd_ps(a, a);
  pairs = _mm256_hadd_ps(pairs, pairs);
  return _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
}
inline float reduce_max(vf a) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_shuffle_ps(half, half, 1)));
}

inline vf load_int8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

// A group of 32 rounded floats as int8.
inline void store_group(int8_t* p, const vf* x) {
  const __m256i low = _mm256_packs_epi32(_mm256_cvtps_epi32(x[0]), _mm256_cvtps_epi32(x[1]));
  const __m256i high = _mm256_packs_epi32(_mm256_cvtps_epi32(x[2]), _mm256_cvtps_epi32(x[3]));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packs work on halves of a register
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order));
}

// Keeps the compiler from adding the products up as a tree, which spills every one of them, and neighbours side by side: Zen 3
// gives multiplications and additions their ports two by two as they come, and in turn they would be a fifth slower.
inline void pin(__m256i& x) { asm("" : "+x"(x)); }
inline void pin(__m256i (&x)[1]) { pin(x[0]); }
inline void pin(__m256i (&x)[2]) { asm("" : "+x"(x[0]), "+x"(x[1])); }

// Dot products of one group of 32 for R rows and P panels: lane c holds a panel's output channel c. `w` is the group's
// packed quants (word j of channel c at (j * W + c) * 4), the next panel's `stride` bytes on, `x[r]` row r's 32 int8. The
// integer sums are exact.
template <int R, int P>
RAMET_ALWAYS_INLINE void dot_q4(const uint8_t* w, int64_t stride, const int8_t* const* x, const GroupScale* const*, int64_t,
                   vf (*out)[R]) {
  const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  __m256i sum[R][P];  // int16: at most 8 * 2 * 15 * 127 = 30480 in magnitude
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) sum[r][p] = _mm256_setzero_si256();
  auto take = [&](const __m256i* half, const int8_t* four, __m256i (&to)[P]) {
    const __m256i value = _mm256_set1_epi32(*reinterpret_cast<const int32_t*>(four));
    __m256i pairs[P];
    for (int p = 0; p < P; ++p) pairs[p] = _mm256_maddubs_epi16(half[p], value);
    pin(pairs);
    for (int p = 0; p < P; ++p) to[p] = _mm256_add_epi16(to[p], pairs[p]);
    pin(to);
  };
  for (int j = 0; j < 4; ++j) {
    __m256i low[P], high[P];
    for (int p = 0; p < P; ++p) {
      const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + p * stride + j * 32));
      low[p] = _mm256_and_si256(both, nibble);
      high[p] = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
    }
    for (int r = 0; r < R; ++r) {
      take(low, x[r] + 4 * j, sum[r]);
      take(high, x[r] + 16 + 4 * j, sum[r]);
    }
  }
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) out[p][r] = _mm256_cvtepi32_ps(_mm256_madd_epi16(sum[r][p], ones));
}

template <int R, int P>
RAMET_ALWAYS_INLINE void dot_q8(const uint8_t* w, int64_t stride, const int8_t* const* x, const GroupScale* const*, int64_t,
                   vf (*out)[R]) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i sum[P][R];
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) sum[p][r] = _mm256_setzero_si256();
  for (int j = 0; j < 8; ++j) {
    __m256i q[P], magnitude[P];
    for (int p = 0; p < P; ++p) {
      q[p] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + p * stride + j * 32));
      magnitude[p] = _mm256_abs_epi8(q[p]);  // 128 at most, as unsigned
    }
    for (int r = 0; r < R; ++r) {
      const __m256i xv = _mm256_set1_epi32(*reinterpret_cast<const int32_t*>(x[r] + 4 * j));
      for (int p = 0; p < P; ++p) {
        // pairs: at most 2 * 128 * 127 = 32512, so the saturating add never saturates
        const __m256i pairs = _mm256_maddubs_epi16(magnitude[p], _mm256_sign_epi8(xv, q[p]));
        sum[p][r] = _mm256_add_epi32(sum[p][r], _mm256_madd_epi16(pairs, ones));
        pin(sum[p][r]);
      }
    }
  }
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) out[p][r] = _mm256_cvtepi32_ps(sum[p][r]);
}

}  // namespace RAMET_ARCH
}  // namespace ramet
