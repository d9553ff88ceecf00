// Weights in the order the products read them.
#pragma once

#include <algorithm>
#include <cstring>

#include "simd.h"

namespace ramet {
namespace RAMET_ARCH {

constexpr int kFloatPanel = 2 * W;  // output channels packed together, float formats
constexpr int kQuantPanel = W;      // and quantised ones

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t panel_width(Format f) { return is_quantized(f) ? kQuantPanel : kFloatPanel; }
inline int64_t n_panels(const LinearWeight& w) { return ceil_div(w.n, panel_width(w.format)); }

inline int64_t element_bytes(Format f) { return f == Format::F32 ? 4 : 2; }

// Neighbours along the input dimension that a float format keeps together, a channel's side by side: bfloat16 goes in
// pairs where the CPU multiplies pairs, and the dimension is filled up to whole tiles for its matrix units.
#if defined(RAMET_AMX)
inline int64_t pack_of(Format f) { return f == Format::BF16 ? 2 : 1; }
inline int64_t padded_k(Format f, int64_t k) { return f == Format::BF16 ? ceil_div(k, 32) * 32 : k; }
#elif defined(RAMET_BF16_DOT)
inline int64_t pack_of(Format f) { return f == Format::BF16 ? 2 : 1; }
inline int64_t padded_k(Format f, int64_t k) { return f == Format::BF16 ? ceil_div(k, 2) * 2 : k; }
#else
inline int64_t pack_of(Format) { return 1; }
inline int64_t padded_k(Format, int64_t k) { return k; }
#endif

// Where channel `row`'s value i lies in a packed float weight, in elements.
inline int64_t float_at(Format f, int64_t k, int64_t row, int64_t i) {
  const int64_t pack = pack_of(f), panel = row / kFloatPanel * kFloatPanel * padded_k(f, k);
  return panel + (i / pack * kFloatPanel + row % kFloatPanel) * pack + i % pack;
}

// A packed group of one panel: W scales (f16), W offsets (f16, Q4_1 only), then the quants.
inline int64_t quant_bytes(Format f) { return (f == Format::Q8 ? kGroup : kGroup / 2) * W; }
inline int64_t group_bytes(Format f) { return quant_bytes(f) + 2 * W + (f == Format::Q4_1 ? 2 * W : 0); }
inline int64_t block_bytes(Format f) { return f == Format::Q8 ? 34 : f == Format::Q4_0 ? 18 : 20; }

inline int64_t packed_bytes(Format f, int64_t n, int64_t k) {
  if (is_quantized(f)) return ceil_div(n, kQuantPanel) * (k / kGroup) * group_bytes(f);
  return ceil_div(n, kFloatPanel) * kFloatPanel * padded_k(f, k) * element_bytes(f);
}

// The output channels [begin, begin + count) of a weight, whole panels, as one of its own.
inline LinearWeight columns(const LinearWeight& w, int64_t begin, int64_t count) {
  const int64_t width = panel_width(w.format), bytes = packed_bytes(w.format, w.n, w.k) / n_panels(w);
  return {w.format, count, w.k, w.packed + begin / width * bytes, w.bias ? w.bias + begin : nullptr};
}

inline void pack_blocks(Format f, int64_t n, int64_t groups, const uint8_t* blocks, uint8_t* packed) {
  const int64_t source = block_bytes(f), n_scales = f == Format::Q4_1 ? 2 : 1;
  const int64_t words = quant_bytes(f) / (4 * W);
  for (int64_t row = 0; row < n; ++row) {
    const int64_t lane = row % W;
    for (int64_t g = 0; g < groups; ++g) {
      const uint8_t* block = blocks + (row * groups + g) * source;
      uint8_t* to = packed + (row / W * groups + g) * group_bytes(f);
      for (int64_t s = 0; s < n_scales; ++s) std::memcpy(to + (s * W + lane) * 2, block + 2 * s, 2);
      const uint8_t* quants = block + 2 * n_scales;
      uint8_t* lanes_of = to + n_scales * 2 * W;
      for (int64_t j = 0; j < words; ++j) std::memcpy(lanes_of + (j * W + lane) * 4, quants + 4 * j, 4);
    }
  }
}

inline void pack(Format f, int64_t n, int64_t k, const void* rows, uint8_t* packed) {
  std::memset(packed, 0, packed_bytes(f, n, k));
  const uint8_t* from = static_cast<const uint8_t*>(rows);
  if (is_quantized(f)) return pack_blocks(f, n, k / kGroup, from, packed);
  const int64_t size = element_bytes(f);
  for (int64_t row = 0; row < n; ++row)
    for (int64_t i = 0; i < k; ++i)
      std::memcpy(packed + float_at(f, k, row, i) * size, from + (row * k + i) * size, size);
}

// ---------------------------------------------------------------- one row back, as float32

inline float unpacked_float(Format f, const uint8_t* at) {
  uint16_t half;
  if (f == Format::F32) {
    float value;
    std::memcpy(&value, at, 4);
    return value;
  }
  std::memcpy(&half, at, 2);
  uint16_t lane[W] = {half};
  float wide[W];
  store(wide, f == Format::BF16 ? load_bf16(lane) : load_f16(lane));
  return wide[0];
}

inline void unpack_blocks(Format f, int64_t groups, int64_t row, const uint8_t* packed, float* out) {
  const int64_t lane = row % W, n_scales = f == Format::Q4_1 ? 2 : 1;
  for (int64_t g = 0; g < groups; ++g, out += kGroup) {
    const uint8_t* from = packed + (row / W * groups + g) * group_bytes(f);
    const float d = unpacked_float(Format::F16, from + 2 * lane);
    const float m = f == Format::Q4_1 ? unpacked_float(Format::F16, from + 2 * (W + lane)) : 0.0f;
    const uint8_t* quants = from + n_scales * 2 * W;
    for (int64_t i = 0; i < (f == Format::Q8 ? kGroup : kGroup / 2); ++i) {
      const uint8_t q = quants[(i / 4 * W + lane) * 4 + i % 4];
      if (f == Format::Q8) {
        out[i] = d * static_cast<float>(static_cast<int8_t>(q));
        continue;
      }
      const float shift = f == Format::Q4_0 ? 8.0f : 0.0f;
      out[i] = d * (static_cast<float>(q & 15) - shift) + m;
      out[i + kGroup / 2] = d * (static_cast<float>(q >> 4) - shift) + m;
    }
  }
}

// out[m, k] = rows `ids` of the weight: what an embedding is.
inline void embed(Team& team, const LinearWeight& w, const int64_t* ids, int64_t m, float* out) {
  int64_t begin, end;
  team.share(m, &begin, &end);
  for (int64_t t = begin; t < end; ++t) {
    float* to = out + t * w.k;
    if (is_quantized(w.format)) {
      unpack_blocks(w.format, w.k / kGroup, ids[t], w.packed, to);
      continue;
    }
    const int64_t size = element_bytes(w.format);
    for (int64_t i = 0; i < w.k; ++i)
      to[i] = unpacked_float(w.format, w.packed + float_at(w.format, w.k, ids[t], i) * size);
  }
}

}  // namespace RAMET_ARCH
}  // namespace ramet
