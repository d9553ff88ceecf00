// How cached keys and values are kept: one head of one token at a time, narrowed when stored, widened when read.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "simd.h"

namespace ramet {
namespace RAMET_ARCH {

inline int64_t kv_bytes(Format f) { return f == Format::F32 ? 4 : f == Format::BF16 || f == Format::F16 ? 2 : 1; }
inline int64_t kv_head_bytes(Format f, int64_t dim) { return f == Format::I8 ? dim + 4 : dim * kv_bytes(f); }

// ---------------------------------------------------------------- reading

// W 8-bit floats. Both kinds are half floats of another exponent range: e5m2 is the upper byte of one, e4m3 is one
// divided by 256; the scaling is exact.
template <Format F>
inline vf load_8bit(const uint8_t* p) {
  uint16_t half[W];
  for (int i = 0; i < W; ++i) {
    const uint16_t sign = static_cast<uint16_t>((p[i] & 0x80) << 8), rest = p[i] & 0x7f;
    half[i] = F == Format::E5M2 ? static_cast<uint16_t>(p[i] << 8)
                                : static_cast<uint16_t>(sign | (rest == 0x7f ? 0x7e00 : rest << 7));
  }
  const vf value = load_f16(half);
  return F == Format::E5M2 ? value : mul(value, set1(256.0f));
}

template <Format F>
inline vf load_kv(const uint8_t* p) {
  const uint16_t* half = reinterpret_cast<const uint16_t*>(p);
  if constexpr (F == Format::F32) return load(reinterpret_cast<const float*>(p));
  else if constexpr (F == Format::BF16) return load_bf16(half);
  else if constexpr (F == Format::F16) return load_f16(half);
  else return load_8bit<F>(p);
}

template <Format F>
inline void widen(const uint8_t* from, int dim, float* to) {
  constexpr int size = F == Format::F32 ? 4 : F == Format::BF16 || F == Format::F16 ? 2 : 1;
  int i = 0;
  for (; i + W <= dim; i += W) store(to + i, load_kv<F>(from + i * size));
  if (i == dim) return;
  uint8_t tail[W * size] = {};
  std::memcpy(tail, from + i * size, (dim - i) * size);
  store(to + i, load_kv<F>(tail));
}

inline void widen_int8(const uint8_t* from, int dim, float* to) {
  const int8_t* q = reinterpret_cast<const int8_t*>(from);
  float scale;
  std::memcpy(&scale, from + dim, 4);
  for (int i = 0; i < dim; ++i) to[i] = scale * static_cast<float>(q[i]);
  std::fill(to + dim, to + (dim + W - 1) / W * W, 0.0f);
}

// One head of one token as padded float32.
template <Format F>
inline void widen_head(const uint8_t* from, int dim, float* to) {
  if constexpr (F == Format::I8) widen_int8(from, dim, to);
  else widen<F>(from, dim, to);
}

// Calls work(integral_constant Format) with the format of a cache.
template <class Work>
inline void with_format(Format f, Work work) {
  switch (f) {
    case Format::F32: return work(std::integral_constant<Format, Format::F32>());
    case Format::BF16: return work(std::integral_constant<Format, Format::BF16>());
    case Format::I8: return work(std::integral_constant<Format, Format::I8>());
    case Format::E4M3: return work(std::integral_constant<Format, Format::E4M3>());
    case Format::E5M2: return work(std::integral_constant<Format, Format::E5M2>());
    default: return work(std::integral_constant<Format, Format::F16>());
  }
}

// ---------------------------------------------------------------- storing

// To nearest, ties to even; beyond the largest finite value to that value; a NaN stays one.
template <int ExponentBits>
inline uint8_t to_8bit(float x) {
  constexpr int mantissa = 7 - ExponentBits, bias = (1 << (ExponentBits - 1)) - 1;
  constexpr float largest = ExponentBits == 4 ? 448.0f : 57344.0f;
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint8_t sign = static_cast<uint8_t>(bits >> 24 & 0x80);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7f;
  float size;
  std::memcpy(&size, &bits, 4);
  if (size >= largest) return sign | (ExponentBits == 4 ? 0x7e : 0x7b);
  const uint32_t least = static_cast<uint32_t>(128 - bias) << 23;  // the smallest normal value
  if (bits < least) return sign | static_cast<uint8_t>(std::nearbyint(std::ldexp(size, bias - 1 + mantissa)));
  constexpr int drop = 23 - mantissa;
  const uint32_t even = bits >> drop & 1;
  return sign | static_cast<uint8_t>((bits - (static_cast<uint32_t>(127 - bias) << 23) + (1u << (drop - 1)) - 1 + even) >> drop);
}

// A head with NaN or infinity gets the scale NaN: what reads it is NaN.
inline void narrow_int8(const float* from, int64_t dim, uint8_t* to) {
  float peak = 0.0f, check = 0.0f;
  for (int64_t i = 0; i < dim; ++i) {
    peak = std::max(peak, std::fabs(from[i]));
    check += from[i] * 0.0f;
  }
  int8_t* q = reinterpret_cast<int8_t*>(to);
  float scale = check == 0.0f ? peak / 127.0f : NAN;
  if (!(check == 0.0f) || peak < 1e-30f) {
    std::memset(q, 0, dim);
    if (check == 0.0f) scale = 0.0f;
  } else {
    const float inverse = 127.0f / peak;
    for (int64_t i = 0; i < dim; ++i) q[i] = static_cast<int8_t>(std::nearbyint(from[i] * inverse));
  }
  std::memcpy(to + dim, &scale, 4);
}

inline void narrow_row(Format f, const float* from, int64_t n, uint8_t* to) {
  uint16_t* half = reinterpret_cast<uint16_t*>(to);
  switch (f) {
    case Format::F32: std::memcpy(to, from, n * 4); return;
    case Format::BF16:
      for (int64_t i = 0; i < n; ++i) half[i] = bf16_of_f32(from[i]);
      return;
    case Format::E4M3:
      for (int64_t i = 0; i < n; ++i) to[i] = to_8bit<4>(from[i]);
      return;
    case Format::E5M2:
      for (int64_t i = 0; i < n; ++i) to[i] = to_8bit<5>(from[i]);
      return;
    default: break;
  }
  for (int64_t i = 0; i < n; i += W) {
    uint16_t lane[W];
    store_f16(lane, load_some(from + i, n - i));
    std::memcpy(half + i, lane, std::min<int64_t>(W, n - i) * 2);
  }
}

// All heads [heads, dim] of one token.
inline void narrow_heads(Format f, const float* from, int64_t heads, int64_t dim, uint8_t* to) {
  if (f != Format::I8) return narrow_row(f, from, heads * dim, to);
  for (int64_t h = 0; h < heads; ++h) narrow_int8(from + h * dim, dim, to + h * (dim + 4));
}

}  // namespace RAMET_ARCH
}  // namespace ramet
