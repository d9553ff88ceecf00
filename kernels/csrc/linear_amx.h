// Products on AMX: tiles of 16 rows by 16 output channels. A tile's element is a chain over the input dimension in order,
// whatever the other rows are, so every number of rows takes this way for bfloat16.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <vector>

#include "activations.h"

namespace ramet {
namespace RAMET_ARCH {

constexpr int64_t kTile = 16;   // rows of a tile
constexpr int64_t kTileK = 32;  // bfloat16 values of one of its rows

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int n_rows, int bytes) {
    rows[tile] = static_cast<uint8_t>(n_rows);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};

// Tiles 0, 1: results of one block of rows and both halves of a panel; 4: rows; 6, 7: weights.
inline void load_config(int n_rows, int row_bytes, int weight_rows) {
  TileConfig config;
  config.set(0, n_rows, 64);
  config.set(1, n_rows, 64);
  config.set(4, n_rows, row_bytes);
  config.set(6, weight_rows, 64);
  config.set(7, weight_rows, 64);
  _tile_loadconfig(&config);
}

// ---------------------------------------------------------------- bfloat16

// Rows [row, row + count) times one panel of 32 channels.
inline void tile_bf16(const LinearWeight& w, int64_t panel, const uint16_t* x, int64_t row, int64_t count, float* out,
                      bool accumulate) {
  const int64_t k = padded_k(Format::BF16, w.k);
  const uint8_t* from = w.packed + panel * kFloatPanel * k * 2;
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t i = 0; i < k; i += kTileK, from += kTile * kFloatPanel * 4) {
    _tile_loadd(4, x + row * k + i, k * 2);
    _tile_loadd(6, from, kFloatPanel * 4);
    _tile_loadd(7, from + 64, kFloatPanel * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
  }
  alignas(64) float sums[2][kTile * kTile];
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  for (int half = 0; half < 2; ++half) {
    const int64_t column = panel * kFloatPanel + half * W, lanes = std::min<int64_t>(W, w.n - column);
    for (int64_t r = 0; lanes > 0 && r < count; ++r)
      emit(load(sums[half] + r * kTile), w.bias ? w.bias + column : nullptr, out + (row + r) * w.n + column, lanes,
           accumulate);
  }
}

inline void bf16_product(Range panels, const LinearWeight& w, const float* x, int64_t m, float* out,
                         bool accumulate) {
  thread_local std::vector<uint16_t> memory;
  const auto [begin, end] = panels;
  if (begin == end) return;
  const int64_t k = padded_k(Format::BF16, w.k), rows = m < kTile ? m : ceil_div(m, kTile) * kTile;
  memory.assign(rows * k, 0);  // the last tile's missing rows are zeros
  for (int64_t row = 0; row < m; ++row)
    for (int64_t i = 0; i < w.k; ++i) memory[row * k + i] = bf16_of_f32(x[row * w.k + i]);
  load_config(static_cast<int>(std::min(m, kTile)), 64, 16);
  for (int64_t panel = begin; panel < end; ++panel)
    for (int64_t row = 0; row < m; row += kTile)
      tile_bf16(w, panel, memory.data(), row, std::min(kTile, m - row), out, accumulate);
  _tile_release();
}

// ---------------------------------------------------------------- quantised

// One group's int32 sums of 16 rows and 16 channels.
template <Format F>
inline void tile_group(const uint8_t* quants, const int8_t* x, int64_t stride, int32_t* sums) {
  alignas(64) uint8_t nibbles[8 * 64];
  _tile_zero(0);
  _tile_loadd(4, x, stride);
  if (F == Format::Q8) {
    _tile_loadd(6, quants, 64);
    _tile_dpbssd(0, 4, 6);
  } else {
    const __m512i low = _mm512_set1_epi8(15);
    for (int j = 0; j < 4; ++j) {
      const __m512i both = _mm512_loadu_si512(quants + j * 64);
      _mm512_storeu_si512(nibbles + j * 64, _mm512_and_si512(both, low));
      _mm512_storeu_si512(nibbles + (4 + j) * 64, _mm512_and_si512(_mm512_srli_epi16(both, 4), low));
    }
    _tile_loadd(6, nibbles, 64);
    _tile_dpbsud(0, 4, 6);
  }
  _tile_stored(0, sums, 64);
}

// Rows [0, m), m a multiple of 16, times panels [begin, end): the same chains as with fewer rows.
template <Format F>
inline void tile_quant_panels(const LinearWeight& w, int64_t begin, int64_t end, const QuantizedRows& x, int64_t m,
                              float* out, bool accumulate) {
  load_config(kTile, kGroup, 8);
  alignas(64) int32_t sums[kTile * kTile];
  for (int64_t panel = begin; panel < end; ++panel) {
    const int64_t column = panel * kQuantPanel, count = std::min<int64_t>(W, w.n - column);
    for (int64_t row = 0; row < m; row += kTile) {
      const uint8_t* from = w.packed + panel * x.groups * group_bytes(F);
      vf total[kTile];
      for (int r = 0; r < kTile; ++r) total[r] = zero();
      for (int64_t g = 0; g < x.groups; ++g, from += group_bytes(F)) {
        const vf d = load_f16(reinterpret_cast<const uint16_t*>(from));
        vf offset = zero();
        if (F == Format::Q4_1) offset = load_f16(reinterpret_cast<const uint16_t*>(from + 2 * W));
        if (F == Format::Q4_0) offset = mul(d, set1(-8.0f));
        tile_group<F>(from + (F == Format::Q4_1 ? 4 * W : 2 * W), x.q + (row * x.groups + g) * kGroup,
                      x.groups * kGroup, sums);
        for (int r = 0; r < kTile; ++r) {
          const GroupScale& scale = x.scales[(row + r) * x.groups + g];
          total[r] = fma(load_int32(sums + r * kTile), mul(d, set1(scale.scale)), total[r]);
          if (F != Format::Q8) total[r] = fma(offset, set1(scale.scaled_sum), total[r]);
        }
      }
      for (int r = 0; r < kTile; ++r)
        emit(total[r], w.bias ? w.bias + column : nullptr, out + (row + r) * w.n + column, count, accumulate);
    }
  }
  _tile_release();
}

}  // namespace RAMET_ARCH
}  // namespace ramet
