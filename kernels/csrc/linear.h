// Linear layers. Every output is one chain of operations over the input dimension in order, whatever the number
// of rows, so a row's bits never depend on its batch.
#pragma once

#include <algorithm>
#include <cstring>

#include "simd.h"

namespace ramet {
namespace RAMET_ARCH {

constexpr int kFloatPanel = 2 * W;  // output channels packed together, float formats
constexpr int kQuantPanel = W;      // and quantised ones
constexpr int64_t kAhead = 8192;    // bytes a product with one row asks for ahead of use

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// ---------------------------------------------------------------- packing

inline int64_t element_bytes(Format f) { return f == Format::F32 ? 4 : 2; }

// A packed group of one panel: W scales (f16), W offsets (f16, Q4_1 only), then the quants.
inline int64_t quant_bytes(Format f) { return (f == Format::Q8 ? kGroup : kGroup / 2) * W; }
inline int64_t group_bytes(Format f) { return quant_bytes(f) + 2 * W + (f == Format::Q4_1 ? 2 * W : 0); }
inline int64_t block_bytes(Format f) { return f == Format::Q8 ? 34 : f == Format::Q4_0 ? 18 : 20; }

inline int64_t packed_bytes(Format f, int64_t n, int64_t k) {
  if (is_quantized(f)) return ceil_div(n, kQuantPanel) * (k / kGroup) * group_bytes(f);
  return ceil_div(n, kFloatPanel) * kFloatPanel * k * element_bytes(f);
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
  for (int64_t row = 0; row < n; ++row) {
    uint8_t* panel = packed + row / kFloatPanel * kFloatPanel * k * size;
    for (int64_t i = 0; i < k; ++i)
      std::memcpy(panel + (i * kFloatPanel + row % kFloatPanel) * size, from + (row * k + i) * size, size);
  }
}

// ---------------------------------------------------------------- activations

// Symmetric int8 with one scale a group. A group with NaN or infinity gets the scale NaN, so the row's output is NaN.
inline void quantize_group(const float* x, int8_t* q, GroupScale* scale) {
  vf peak = zero(), check = zero();
  for (int i = 0; i < kGroup; i += W) {
    peak = max(abs(load(x + i)), peak);
    check = fma(load(x + i), zero(), check);
  }
  const float amax = reduce_max(peak), broken = reduce_add(check);  // 0, or NaN if any value is not finite
  if (!(broken == 0.0f) || amax < 1e-30f) {
    std::memset(q, 0, kGroup);
    *scale = {broken, broken, 0, 0};
    return;
  }
  const vf inverse = set1(127.0f / amax);
  for (int i = 0; i < kGroup; i += W) store_int8(q + i, round(mul(load(x + i), inverse)));
  int32_t sum = 0;
  for (int i = 0; i < kGroup; ++i) sum += q[i];
  const float d = amax / 127.0f;
  *scale = {d, d * static_cast<float>(sum), sum, 0};
}

inline void quantize_row(const float* x, int64_t row, int64_t begin_group, int64_t end_group, const QuantizedRows& to) {
  for (int64_t g = begin_group; g < end_group; ++g)
    quantize_group(x + g * kGroup, to.q + (row * to.groups + g) * kGroup, to.scales + row * to.groups + g);
}

// ---------------------------------------------------------------- products

// Writes `count` lanes of a result: x + bias, or out + (x + bias).
inline void emit(vf x, const float* bias, float* out, int64_t count, bool accumulate) {
  if (count >= W) {
    if (bias) x = add(x, load(bias));
    store(out, accumulate ? add(load(out), x) : x);
    return;
  }
  float lane[W];
  store(lane, x);
  for (int64_t i = 0; i < count; ++i) {
    const float value = bias ? lane[i] + bias[i] : lane[i];
    out[i] = accumulate ? out[i] + value : value;
  }
}

template <Format F, int R>
inline void quant_rows(const LinearWeight& w, int64_t panel, const QuantizedRows& x, int64_t row, float* out,
                       bool accumulate) {
  const int64_t groups = x.groups;
  const uint8_t* from = w.packed + panel * groups * group_bytes(F);
  const int8_t* q[R];
  const GroupScale* scales[R];
  vf total[R], dot[R];
  for (int r = 0; r < R; ++r) {
    q[r] = x.q + (row + r) * groups * kGroup;
    scales[r] = x.scales + (row + r) * groups;
    total[r] = zero();
  }
  for (int64_t g = 0; g < groups; ++g, from += group_bytes(F)) {
    const vf d = load_f16(reinterpret_cast<const uint16_t*>(from));
    vf m = zero();
    if (F == Format::Q4_1) m = load_f16(reinterpret_cast<const uint16_t*>(from + 2 * W));
    if (F == Format::Q4_0) m = mul(d, set1(-8.0f));
    const uint8_t* quants = from + (F == Format::Q4_1 ? 4 * W : 2 * W);
    for (int64_t line = 0; R == 1 && line < group_bytes(F); line += 64) __builtin_prefetch(from + kAhead + line);
    if (F == Format::Q8) dot_q8<R>(quants, q, scales, g, dot);
    else dot_q4<R>(quants, q, scales, g, dot);
    for (int r = 0; r < R; ++r) {
      total[r] = fma(dot[r], mul(d, set1(scales[r][g].scale)), total[r]);
      if (F != Format::Q8) total[r] = fma(m, set1(scales[r][g].scaled_sum), total[r]);
      q[r] += kGroup;
    }
  }
  const int64_t column = panel * kQuantPanel, count = std::min<int64_t>(W, w.n - column);
  for (int r = 0; r < R; ++r)
    emit(total[r], w.bias ? w.bias + column : nullptr, out + (row + r) * w.n + column, count, accumulate);
}

template <Format F>
inline void quant_product(Team& team, const LinearWeight& w, const QuantizedRows& x, int64_t m, float* out,
                          bool accumulate) {
  int64_t begin, end;
  team.share(ceil_div(w.n, kQuantPanel), &begin, &end);
  for (int64_t panel = begin; panel < end; ++panel) {
    int64_t row = 0;
    for (; row + 4 <= m; row += 4) quant_rows<F, 4>(w, panel, x, row, out, accumulate);
    if (m - row == 3) quant_rows<F, 3>(w, panel, x, row, out, accumulate);
    if (m - row == 2) quant_rows<F, 2>(w, panel, x, row, out, accumulate);
    if (m - row == 1) quant_rows<F, 1>(w, panel, x, row, out, accumulate);
  }
}

template <Format F>
inline vf load_weight(const uint8_t* p) {
  if (F == Format::F32) return load(reinterpret_cast<const float*>(p));
  const uint16_t* half = reinterpret_cast<const uint16_t*>(p);
  return F == Format::BF16 ? load_bf16(half) : load_f16(half);
}

// R rows times P neighbouring panels: 2 * R * P chains run side by side.
template <Format F, int R, int P>
inline void float_rows(const LinearWeight& w, int64_t panel, const float* x, int64_t row, float* out,
                       bool accumulate) {
  constexpr int64_t size = F == Format::F32 ? 4 : 2;
  const int64_t k = w.k, stride = kFloatPanel * k * size;
  const uint8_t* from = w.packed + panel * stride;
  const float* rows = x + row * k;
  vf total[R][P][2];
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) total[r][p][0] = total[r][p][1] = zero();
  for (int64_t i = 0; i < k; ++i, from += kFloatPanel * size) {
    for (int p = 0; p < P; ++p) {
      const vf low = load_weight<F>(from + p * stride), high = load_weight<F>(from + p * stride + W * size);
      for (int r = 0; r < R; ++r) {
        const vf value = set1(rows[r * k + i]);
        total[r][p][0] = fma(low, value, total[r][p][0]);
        total[r][p][1] = fma(high, value, total[r][p][1]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p)
      for (int half = 0; half < 2; ++half) {
        const int64_t column = (panel + p) * kFloatPanel + half * W, count = std::min<int64_t>(W, w.n - column);
        if (count > 0)
          emit(total[r][p][half], w.bias ? w.bias + column : nullptr, out + (row + r) * w.n + column, count,
               accumulate);
      }
}

template <Format F, int R, int P>
inline int64_t float_panels(const LinearWeight& w, int64_t panel, int64_t end, const float* x, int64_t row, float* out,
                            bool accumulate) {
  for (; panel + P <= end; panel += P) float_rows<F, R, P>(w, panel, x, row, out, accumulate);
  return panel;
}

template <Format F>
inline void float_product(Team& team, const LinearWeight& w, const float* x, int64_t m, float* out, bool accumulate) {
  int64_t begin, end;
  team.share(ceil_div(w.n, kFloatPanel), &begin, &end);
  if (m < 4) {
    int64_t panel = begin;
    if (m == 1) panel = float_panels<F, 1, 4>(w, panel, end, x, 0, out, accumulate);
    if (m == 2) panel = float_panels<F, 2, 2>(w, panel, end, x, 0, out, accumulate);
    for (; panel < end; ++panel) {
      if (m == 1) float_rows<F, 1, 1>(w, panel, x, 0, out, accumulate);
      if (m == 2) float_rows<F, 2, 1>(w, panel, x, 0, out, accumulate);
      if (m == 3) float_rows<F, 3, 1>(w, panel, x, 0, out, accumulate);
    }
    return;
  }
  for (int64_t panel = begin; panel < end; ++panel) {
    int64_t row = 0;
    for (; row + 6 <= m; row += 6) float_rows<F, 6, 1>(w, panel, x, row, out, accumulate);
    switch (m - row) {
      case 1: float_rows<F, 1, 1>(w, panel, x, row, out, accumulate); break;
      case 2: float_rows<F, 2, 1>(w, panel, x, row, out, accumulate); break;
      case 3: float_rows<F, 3, 1>(w, panel, x, row, out, accumulate); break;
      case 4: float_rows<F, 4, 1>(w, panel, x, row, out, accumulate); break;
      case 5: float_rows<F, 5, 1>(w, panel, x, row, out, accumulate); break;
      default: break;
    }
  }
}

// The product alone: for a quantised weight the activations are in `rows` already.
inline void product(Team& team, const LinearWeight& w, const float* x, int64_t m, const QuantizedRows& rows, float* out,
                    bool accumulate) {
  switch (w.format) {
    case Format::F32: return float_product<Format::F32>(team, w, x, m, out, accumulate);
    case Format::BF16: return float_product<Format::BF16>(team, w, x, m, out, accumulate);
    case Format::F16: return float_product<Format::F16>(team, w, x, m, out, accumulate);
    case Format::Q8: return quant_product<Format::Q8>(team, w, rows, m, out, accumulate);
    case Format::Q4_0: return quant_product<Format::Q4_0>(team, w, rows, m, out, accumulate);
    case Format::Q4_1: return quant_product<Format::Q4_1>(team, w, rows, m, out, accumulate);
  }
}

// Ends with this thread's part written; the caller syncs before anyone reads it.
inline void linear(Team& team, const LinearWeight& w, const float* x, int64_t m, QuantizedRows rows, float* out,
                   bool accumulate) {
  if (is_quantized(w.format)) {
    rows.groups = w.k / kGroup;
    int64_t begin, end;
    team.share(m * rows.groups, &begin, &end);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / rows.groups, g = i % rows.groups;
      quantize_row(x + row * w.k, row, g, g + 1, rows);
    }
    team.sync();
  }
  product(team, w, x, m, rows, out, accumulate);
}

}  // namespace RAMET_ARCH
}  // namespace ramet
