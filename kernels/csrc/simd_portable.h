// Eight lanes of plain C++: any machine, and the readable meaning of the other two.
#pragma once

#include <cmath>
#include <cstring>

#include "api.h"

namespace ramet {
namespace RAMET_ARCH {

constexpr int W = 8;
struct vf {
  float v[W];
};

template <class Op>
inline vf lanes(Op op) {
  vf out;
  for (int i = 0; i < W; ++i) out.v[i] = op(i);
  return out;
}

inline vf set1(float x) {
  return lanes([&](int) { return x; });
}
inline vf zero() { return set1(0.0f); }
inline vf load(const float* p) {
  return lanes([&](int i) { return p[i]; });
}
inline void store(float* p, vf x) { std::memcpy(p, x.v, sizeof x.v); }
inline vf add(vf a, vf b) {
  return lanes([&](int i) { return a.v[i] + b.v[i]; });
}
inline vf sub(vf a, vf b) {
  return lanes([&](int i) { return a.v[i] - b.v[i]; });
}
inline vf mul(vf a, vf b) {
  return lanes([&](int i) { return a.v[i] * b.v[i]; });
}
inline vf div(vf a, vf b) {
  return lanes([&](int i) { return a.v[i] / b.v[i]; });
}
inline vf fma(vf a, vf b, vf c) { return add(mul(a, b), c); }
inline vf max(vf a, vf b) {  // b where either is NaN
  return lanes([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline vf min(vf a, vf b) {
  return lanes([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline vf abs(vf a) {
  return lanes([&](int i) { return std::fabs(a.v[i]); });
}
inline vf round(vf a) {
  return lanes([&](int i) { return std::nearbyint(a.v[i]); });
}

// a * 2^n for whole n in [-126, 127].
inline vf scale2(vf a, vf n) {
  return lanes([&](int i) {
    const uint32_t bits = static_cast<uint32_t>(n.v[i] == n.v[i] ? static_cast<int32_t>(n.v[i]) + 127 : 0) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return a.v[i] * power;
  });
}

inline float f32_of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline float f32_of_f16(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, rest = h & 0x7fff;
  if (rest >= 0x7c00) return f32_of_bits(sign | 0x7f800000 | ((rest & 0x3ff) << 13));
  const float magnitude = rest < 0x400 ? std::ldexp(static_cast<float>(rest), -24)
                                       : f32_of_bits((rest << 13) + (112u << 23));
  return sign ? -magnitude : magnitude;
}
inline uint16_t f16_of_f32(float x) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;
  if (bits >= 0x477ff000) return sign | 0x7c00;
  if (bits < 0x38800000) return sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(f32_of_bits(bits), 24)));
  return sign | static_cast<uint16_t>((bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13);
}

inline vf load_bf16(const uint16_t* p) {
  return lanes([&](int i) { return f32_of_bits(static_cast<uint32_t>(p[i]) << 16); });
}
inline vf load_f16(const uint16_t* p) {
  return lanes([&](int i) { return f32_of_f16(p[i]); });
}
inline void store_f16(uint16_t* p, vf x) {
  for (int i = 0; i < W; ++i) p[i] = f16_of_f32(x.v[i]);
}

inline float reduce_add(vf a) {
  return ((a.v[0] + a.v[1]) + (a.v[2] + a.v[3])) + ((a.v[4] + a.v[5]) + (a.v[6] + a.v[7]));
}
inline float reduce_max(vf a) {
  float best = a.v[0];
  for (int i = 1; i < W; ++i) best = a.v[i] > best ? a.v[i] : best;
  return best;
}
inline void reduce8(const vf* a, float* out) {
  for (int i = 0; i < 8; ++i) out[i] = reduce_add(a[i]);
}

inline vf load_int8(const int8_t* p) {
  return lanes([&](int i) { return static_cast<float>(p[i]); });
}

// A group of 32 rounded floats as int8.
inline void store_group(int8_t* p, const vf* x) {
  for (int i = 0; i < 32; ++i) p[i] = static_cast<int8_t>(x[i / W].v[i % W]);
}

// Dot products of one group of 32: lane c holds output channel c. `w` is the group's packed quants (word j of
// channel c at (j * W + c) * 4), `x[r]` row r's 32 int8. The integer sums are exact.
template <int R, int P>
RAMET_ALWAYS_INLINE void dot_q4(const uint8_t* w, int64_t stride, const int8_t* const* x, const GroupScale* const*, int64_t,
                   vf (*out)[R]) {
  for (int p = 0; p < P; ++p, w += stride)
    for (int r = 0; r < R; ++r)
      out[p][r] = lanes([&](int c) {
        int32_t sum = 0;
        for (int i = 0; i < 16; ++i) {
          const uint8_t both = w[(i / 4 * W + c) * 4 + i % 4];
          sum += (both & 15) * x[r][i] + (both >> 4) * x[r][16 + i];
        }
        return static_cast<float>(sum);
      });
}

template <int R, int P>
RAMET_ALWAYS_INLINE void dot_q8(const uint8_t* w, int64_t stride, const int8_t* const* x, const GroupScale* const*, int64_t,
                   vf (*out)[R]) {
  for (int p = 0; p < P; ++p, w += stride)
    for (int r = 0; r < R; ++r)
      out[p][r] = lanes([&](int c) {
        int32_t sum = 0;
        for (int i = 0; i < 32; ++i) sum += static_cast<int8_t>(w[(i / 4 * W + c) * 4 + i % 4]) * x[r][i];
        return static_cast<float>(sum);
      });
}

}  // namespace RAMET_ARCH
}  // namespace ramet
