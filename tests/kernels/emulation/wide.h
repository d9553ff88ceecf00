// Makes the AVX-512 and AMX intrinsics of the kernels run on any x86 CPU: SIMDe emulates the former, and what it lacks,
// AMX included, is written out here. Forced into the wide variants' compilation by kernels.build; for tests only.
#pragma once

#include <immintrin.h>

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#undef __m512bh
#define __m512bh simde__m512i

namespace ramet_emulation {

template <class T, class V>
inline void get(const V& from, T* to) {
  std::memcpy(to, &from, sizeof from);
}
template <class V, class T>
inline V put(const T* from) {
  V to;
  std::memcpy(&to, from, sizeof to);
  return to;
}

inline float widened(uint16_t bf16) {
  const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline simde__m512i cvtps_epi32(simde__m512 a) {
  float x[16];
  int32_t y[16];
  get(a, x);
  for (int i = 0; i < 16; ++i) y[i] = x[i] != x[i] ? INT32_MIN : static_cast<int32_t>(std::nearbyint(x[i]));
  return put<simde__m512i>(y);
}
inline simde__m512 cvtepi32_ps(simde__m512i a) {
  int32_t x[16];
  float y[16];
  get(a, x);
  for (int i = 0; i < 16; ++i) y[i] = static_cast<float>(x[i]);
  return put<simde__m512>(y);
}
inline simde__m512i cvtepi8_epi32(__m128i a) {
  int8_t in[16];
  int32_t out[16];
  std::memcpy(in, &a, sizeof in);
  for (int i = 0; i < 16; ++i) out[i] = in[i];
  simde__m512i wide;
  std::memcpy(&wide, out, sizeof out);
  return wide;
}
inline simde__m512i cvtepu16_epi32(__m256i a) {
  uint16_t x[16];
  uint32_t y[16];
  get(a, x);
  for (int i = 0; i < 16; ++i) y[i] = x[i];
  return put<simde__m512i>(y);
}
inline simde__m512 cvtph_ps(__m256i a) {
  uint16_t x[16];
  float y[16];
  get(a, x);
  for (int i = 0; i < 16; ++i) y[i] = _cvtsh_ss(x[i]);
  return put<simde__m512>(y);
}
inline __m256i cvtps_ph(simde__m512 a) {
  float x[16];
  uint16_t y[16];
  get(a, x);
  for (int i = 0; i < 16; ++i) y[i] = _cvtss_sh(x[i], 0);
  return put<__m256i>(y);
}
inline float reduce_add(simde__m512 a) {
  float x[16];
  get(a, x);
  for (int n = 8; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) x[i] += x[i + n];
  return x[0];
}
inline float reduce_max(simde__m512 a) {
  float x[16];
  get(a, x);
  for (int i = 1; i < 16; ++i) x[0] = x[0] > x[i] ? x[0] : x[i];
  return x[0];
}
inline simde__m512 fmadd_ps(simde__m512 a, simde__m512 b, simde__m512 c) {
  float x[16], y[16], z[16];
  get(a, x);
  get(b, y);
  get(c, z);
  for (int i = 0; i < 16; ++i) z[i] = std::fma(x[i], y[i], z[i]);
  return put<simde__m512>(z);
}
inline simde__m512 dpbf16_ps(simde__m512 sum, simde__m512i a, simde__m512i b) {
  float out[16];
  uint16_t x[32], y[32];
  get(sum, out);
  get(a, x);
  get(b, y);
  for (int i = 0; i < 16; ++i) {
    out[i] += widened(x[2 * i + 1]) * widened(y[2 * i + 1]);
    out[i] += widened(x[2 * i]) * widened(y[2 * i]);
  }
  return put<simde__m512>(out);
}

// ---------------------------------------------------------------- AMX

struct Tiles {
  struct Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } config{};
  bool loaded = false;
  alignas(64) uint8_t data[8][16][64];
};
inline Tiles& tiles() {
  thread_local Tiles state;
  if (!state.loaded && state.config.palette == 0) std::memset(state.data, 0xff, sizeof state.data);
  return state;
}
[[noreturn]] inline void fault() { __builtin_trap(); }  // what the CPU does where a tile is not set up or misfits

inline void load_config(const void* from) {
  Tiles& t = tiles();
  std::memcpy(&t.config, from, sizeof t.config);
  if (t.config.palette != 1) fault();
  for (int i = 0; i < 8; ++i)
    if (t.config.rows[i] > 16 || t.config.row_bytes[i] > 64) fault();
  std::memset(t.data, 0, sizeof t.data);
  t.loaded = true;
}
inline void release() { tiles() = Tiles{}; }
inline Tiles& used(int tile) {
  Tiles& t = tiles();
  if (!t.loaded || tile < 0 || tile > 7 || t.config.rows[tile] == 0) fault();
  return t;
}
inline void zero(int tile) { std::memset(used(tile).data[tile], 0, sizeof tiles().data[tile]); }
inline void load(int tile, const void* from, int64_t stride) {
  Tiles& t = used(tile);
  for (int r = 0; r < t.config.rows[tile]; ++r)
    std::memcpy(t.data[tile][r], static_cast<const uint8_t*>(from) + r * stride, t.config.row_bytes[tile]);
}
inline void save(int tile, void* to, int64_t stride) {
  Tiles& t = used(tile);
  for (int r = 0; r < t.config.rows[tile]; ++r)
    std::memcpy(static_cast<uint8_t*>(to) + r * stride, t.data[tile][r], t.config.row_bytes[tile]);
}
inline void check(const Tiles& t, int c, int a, int b) {
  if (t.config.rows[c] != t.config.rows[a] || t.config.row_bytes[c] != t.config.row_bytes[b] ||
      t.config.row_bytes[a] != 4 * t.config.rows[b])
    fault();
}

// c[m][n] += sums over 4-byte words of a's row m and b's column n; `word(a, b)` is the sum of one pair of words.
template <class T, class Word>
inline void multiply(int c, int a, int b, Word word) {
  Tiles& t = used(c);
  used(a);
  used(b);
  check(t, c, a, b);
  for (int m = 0; m < t.config.rows[c]; ++m)
    for (int n = 0; n < t.config.row_bytes[c] / 4; ++n) {
      T sum{};
      for (int k = 0; k < t.config.row_bytes[a] / 4; ++k) word(t.data[a][m] + 4 * k, t.data[b][k] + 4 * n, &sum);
      sum.add_to(t.data[c][m] + 4 * n);
    }
}
struct Floats {  // even and odd products are added up apart, as the CPU does
  float even = 0.0f, odd = 0.0f;
  void add_to(uint8_t* at) const {
    float value;
    std::memcpy(&value, at, 4);
    value += even + odd;
    std::memcpy(at, &value, 4);
  }
};
struct Ints {
  int32_t total = 0;
  void add_to(uint8_t* at) const {
    int32_t value;
    std::memcpy(&value, at, 4);
    value += total;
    std::memcpy(at, &value, 4);
  }
};
inline void dpbf16(int c, int a, int b) {
  multiply<Floats>(c, a, b, [](const uint8_t* x, const uint8_t* y, Floats* sum) {
    uint16_t u[2], v[2];
    std::memcpy(u, x, 4);
    std::memcpy(v, y, 4);
    sum->even = std::fma(widened(u[0]), widened(v[0]), sum->even);
    sum->odd = std::fma(widened(u[1]), widened(v[1]), sum->odd);
  });
}
template <class B>
inline void dpb(int c, int a, int b) {
  multiply<Ints>(c, a, b, [](const uint8_t* x, const uint8_t* y, Ints* sum) {
    for (int i = 0; i < 4; ++i) sum->total += static_cast<int8_t>(x[i]) * static_cast<int>(static_cast<B>(y[i]));
  });
}

}  // namespace ramet_emulation

#undef _mm512_cvtps_epi32
#undef _mm512_cvtepi32_ps
#undef _mm512_cvtepu16_epi32
#undef _mm512_cvtepi8_epi32
#undef _mm512_cvtph_ps
#undef _mm512_cvtps_ph
#undef _mm512_reduce_add_ps
#undef _mm512_reduce_max_ps
#undef _mm512_fmadd_ps
#undef _mm512_dpbf16_ps
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbsud
#define _mm512_cvtps_epi32(a) ramet_emulation::cvtps_epi32(a)
#define _mm512_cvtepi32_ps(a) ramet_emulation::cvtepi32_ps(a)
#define _mm512_cvtepu16_epi32(a) ramet_emulation::cvtepu16_epi32(a)
#define _mm512_cvtepi8_epi32(a) ramet_emulation::cvtepi8_epi32(a)
#define _mm512_cvtph_ps(a) ramet_emulation::cvtph_ps(a)
#define _mm512_cvtps_ph(a, mode) ramet_emulation::cvtps_ph(a)
#define _mm512_reduce_add_ps(a) ramet_emulation::reduce_add(a)
#define _mm512_reduce_max_ps(a) ramet_emulation::reduce_max(a)
#define _mm512_fmadd_ps(a, b, c) ramet_emulation::fmadd_ps(a, b, c)
#define _mm512_dpbf16_ps(sum, a, b) ramet_emulation::dpbf16_ps(sum, a, b)
#define _tile_loadconfig(from) ramet_emulation::load_config(from)
#define _tile_release() ramet_emulation::release()
#define _tile_zero(tile) ramet_emulation::zero(tile)
#define _tile_loadd(tile, from, stride) ramet_emulation::load(tile, from, stride)
#define _tile_stored(tile, to, stride) ramet_emulation::save(tile, to, stride)
#define _tile_dpbf16ps(c, a, b) ramet_emulation::dpbf16(c, a, b)
#define _tile_dpbssd(c, a, b) ramet_emulation::dpb<int8_t>(c, a, b)
#define _tile_dpbsud(c, a, b) ramet_emulation::dpb<uint8_t>(c, a, b)
