// Linear layers. Every output is one chain of operations over the input dimension in order, whatever the number
// of rows, so a row's bits never depend on its batch.
#pragma once

#include <algorithm>
#include <cstring>

#include "activations.h"
#if defined(RAMET_AMX)
#include "linear_amx.h"
#elif defined(RAMET_BF16_DOT)
#include "linear_bf16.h"
#endif

namespace ramet {
namespace RAMET_ARCH {

constexpr int64_t kAhead = 8192;  // bytes that are asked for ahead of use, at least

// ---------------------------------------------------------------- products

// One of the passes over some panels, each for a few rows. Each asks for its share of the panels that come next.
struct Pass {
  int64_t number, of;
};

// R rows times P neighbouring panels.
template <Format F, int R, int P>
inline void quant_rows(const LinearWeight& w, int64_t panel, const QuantizedRows& x, int64_t row, Pass pass, float* out,
                       bool accumulate) {
  const int64_t groups = x.groups, stride = groups * group_bytes(F);
  const uint8_t* from = w.packed + panel * stride;
  const int8_t* q[R];
  const GroupScale* scales[R];
  const int64_t lines = ceil_div(P * group_bytes(F), 64 * pass.of);  // asked for with each group
  const uint8_t* ahead = from + std::max(kAhead, P * stride) + pass.number * lines * groups * 64;
  vf total[P][R], dot[P][R];
  for (int r = 0; r < R; ++r) {
    q[r] = x.q + (row + r) * groups * kGroup;
    scales[r] = x.scales + (row + r) * groups;
    for (int p = 0; p < P; ++p) {
      total[p][r] = zero();
      __builtin_prefetch(out + (row + r) * w.n + (panel + p) * kQuantPanel, 1);
    }
  }
  for (int64_t g = 0; g < groups; ++g, from += group_bytes(F)) {
    const uint8_t* quants = from + (F == Format::Q4_1 ? 4 * W : 2 * W);
    __builtin_prefetch(ahead);
    for (int64_t i = 1; i < lines; ++i) __builtin_prefetch(ahead + i * 64);
    ahead += lines * 64;
    if (F == Format::Q8) dot_q8<R, P>(quants, stride, q, scales, g, dot);
    else dot_q4<R, P>(quants, stride, q, scales, g, dot);
    for (int p = 0; p < P; ++p) {
      const uint16_t* head = reinterpret_cast<const uint16_t*>(from + p * stride);
      const vf d = load_f16(head);
      const vf m = F == Format::Q4_1 ? load_f16(head + W) : F == Format::Q4_0 ? mul(d, set1(-8.0f)) : zero();
      for (int r = 0; r < R; ++r) {
        total[p][r] = fma(dot[p][r], mul(d, set1(scales[r][g].scale)), total[p][r]);
        if (F != Format::Q8) total[p][r] = fma(m, set1(scales[r][g].scaled_sum), total[p][r]);
      }
    }
    for (int r = 0; r < R; ++r) q[r] += kGroup;
  }
  float* to = out + row * w.n + panel * kQuantPanel;
  if (!w.bias && !accumulate && (panel + P) * kQuantPanel <= w.n) {
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < P; ++p) store(to + r * w.n + p * kQuantPanel, total[p][r]);
    return;
  }
  for (int p = 0; p < P; ++p) {
    const int64_t column = (panel + p) * kQuantPanel, count = std::min<int64_t>(W, w.n - column);
    for (int r = 0; r < R; ++r)
      emit(total[p][r], w.bias ? w.bias + column : nullptr, out + (row + r) * w.n + column, count, accumulate);
  }
}

template <Format F, int P>
inline void quant_panels(const LinearWeight& w, int64_t panel, const QuantizedRows& x, int64_t row, int64_t end,
                         float* out, bool accumulate) {
  Pass pass{0, ceil_div(end - row, 4)};
  while (end - row >= 4 && end - row != 5) {  // 3 and 2 unpack as often as 4 and 1, and 1 wastes the most
    quant_rows<F, 4, P>(w, panel, x, row, pass, out, accumulate);
    row += 4;
    ++pass.number;
  }
  if (end - row == 5 || end - row == 3) {
    quant_rows<F, 3, P>(w, panel, x, row, pass, out, accumulate);
    row += 3;
    ++pass.number;
  }
  if (end - row == 2) quant_rows<F, 2, P>(w, panel, x, row, pass, out, accumulate);
  if (end - row == 1) quant_rows<F, 1, P>(w, panel, x, row, pass, out, accumulate);
}

template <Format F>
inline void quant_product(Range panels, const LinearWeight& w, const QuantizedRows& x, int64_t m, float* out,
                          bool accumulate) {
#if defined(RAMET_AMX)
  const int64_t tiled = m / kTile * kTile;  // the integer sums are exact, so a row's bits are the same either way
  if (tiled) tile_quant_panels<F>(w, panels.begin, panels.end, x, tiled, out, accumulate);
#else
  const int64_t tiled = 0;
#endif
  for (int64_t row = tiled; row < m; row += kRowBlock) {
    const int64_t end = std::min<int64_t>(m, row + kRowBlock);
    int64_t panel = panels.begin;  // a row alone is bound by memory, which one stream of reads suits better
    for (; m > 1 && panel + 2 <= panels.end; panel += 2) quant_panels<F, 2>(w, panel, x, row, end, out, accumulate);
    for (; panel < panels.end; ++panel) quant_panels<F, 1>(w, panel, x, row, end, out, accumulate);
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
inline void float_product(Range panels, const LinearWeight& w, const float* x, int64_t m, float* out,
                          bool accumulate) {
  const auto [begin, end] = panels;
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

// What `rows` or `x` gives for some panels of output channels; a quantised weight reads `rows`, another one `x`.
[[gnu::noinline]] inline void product(Range panels, const LinearWeight& w, const float* x, int64_t m, const QuantizedRows& rows,
                    float* out, bool accumulate) {
  switch (w.format) {
    case Format::F32: return float_product<Format::F32>(panels, w, x, m, out, accumulate);
#if defined(RAMET_BF16_DOT)
    case Format::BF16: return bf16_product(panels, w, x, m, out, accumulate);
#else
    case Format::BF16: return float_product<Format::BF16>(panels, w, x, m, out, accumulate);
#endif
    case Format::F16: return float_product<Format::F16>(panels, w, x, m, out, accumulate);
    case Format::Q8: return quant_product<Format::Q8>(panels, w, rows, m, out, accumulate);
    case Format::Q4_0: return quant_product<Format::Q4_0>(panels, w, rows, m, out, accumulate);
    case Format::Q4_1: return quant_product<Format::Q4_1>(panels, w, rows, m, out, accumulate);
    default: return;  // a KV format: no weight has one
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
  product(team.share(n_panels(w)), w, x, m, rows, out, accumulate);
}

}  // namespace RAMET_ARCH
}  // namespace ramet
