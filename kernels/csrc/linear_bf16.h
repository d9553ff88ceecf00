// bfloat16 weights on AVX512-BF16: activations are rounded to bfloat16 once, and pairs of products are added in float32.
#pragma once

#include <algorithm>
#include <vector>

#include "activations.h"

namespace ramet {
namespace RAMET_ARCH {

// x [m, k] as bfloat16, rows padded with zeros to `stride`.
inline const uint16_t* narrow_rows(const float* x, int64_t m, int64_t k, int64_t stride, std::vector<uint16_t>& memory) {
  memory.resize(m * stride);
  for (int64_t row = 0; row < m; ++row) {
    uint16_t* to = memory.data() + row * stride;
    for (int64_t i = 0; i < k; ++i) to[i] = bf16_of_f32(x[row * k + i]);
    std::fill(to + k, to + stride, static_cast<uint16_t>(0));
  }
  return memory.data();
}

// R rows times P neighbouring panels of 2 * W channels.
template <int R, int P>
inline void bf16_rows(const LinearWeight& w, int64_t panel, const uint16_t* x, int64_t row, float* out,
                      bool accumulate) {
  const int64_t k = padded_k(Format::BF16, w.k), stride = kFloatPanel * k * 2;
  const uint8_t* from = w.packed + panel * stride;
  vf total[R][P][2];
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) total[r][p][0] = total[r][p][1] = zero();
  for (int64_t i = 0; i < k; i += 2, from += kFloatPanel * 4) {
    for (int p = 0; p < P; ++p)
      for (int half = 0; half < 2; ++half)
        for (int r = 0; r < R; ++r)
          total[r][p][half] =
              dot_bf16(total[r][p][half], from + p * stride + half * W * 4, x + (row + r) * k + i);
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

inline void bf16_product(Range panels, const LinearWeight& w, const float* x, int64_t m, float* out,
                         bool accumulate) {
  thread_local std::vector<uint16_t> memory;
  const auto [begin, end] = panels;
  if (begin == end) return;
  const uint16_t* rows = narrow_rows(x, m, w.k, padded_k(Format::BF16, w.k), memory);
  int64_t panel = begin;
  if (m == 1)  // four panels at a time hide the latency of their chains
    for (; panel + 4 <= end; panel += 4) bf16_rows<1, 4>(w, panel, rows, 0, out, accumulate);
  for (; panel < end; ++panel) {
    int64_t row = 0;
    for (; row + 6 <= m; row += 6) bf16_rows<6, 1>(w, panel, rows, row, out, accumulate);
    for (; row + 2 <= m; row += 2) bf16_rows<2, 1>(w, panel, rows, row, out, accumulate);
    if (row < m) bf16_rows<1, 1>(w, panel, rows, row, out, accumulate);
  }
}

}  // namespace RAMET_ARCH
}  // namespace ramet
