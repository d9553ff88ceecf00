// What products read and write beside weights: quantised rows in, lanes of outputs out.
#pragma once

#include <algorithm>
#include <cstring>

#include "packing.h"

namespace ramet {
namespace RAMET_ARCH {

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
  vf whole[kGroup / W], total = zero();
  for (int i = 0; i < kGroup / W; ++i) {
    whole[i] = round(mul(load(x + i * W), inverse));
    total = add(total, whole[i]);
  }
  store_group(q, whole);
  const float d = amax / 127.0f, sum = reduce_add(total);  // of whole numbers, so exact in any order
  *scale = {d, d * sum, static_cast<int32_t>(sum), 0};
}

inline void quantize_row(const float* x, int64_t row, int64_t begin_group, int64_t end_group, const QuantizedRows& to) {
  for (int64_t g = begin_group; g < end_group; ++g)
    quantize_group(x + g * kGroup, to.q + (row * to.groups + g) * kGroup, to.scales + row * to.groups + g);
}

[[gnu::noinline]] inline void emit_some(vf x, const float* bias, float* out, int64_t count, bool accumulate) {
  float lane[W];
  store(lane, x);
  for (int64_t i = 0; i < count; ++i) {
    const float value = bias ? lane[i] + bias[i] : lane[i];
    out[i] = accumulate ? out[i] + value : value;
  }
}

// Writes `count` lanes of a result: x + bias, or out + (x + bias).
RAMET_ALWAYS_INLINE void emit(vf x, const float* bias, float* out, int64_t count, bool accumulate) {
  if (count < W) return emit_some(x, bias, out, count, accumulate);
  if (bias) x = add(x, load(bias));
  store(out, accumulate ? add(load(out), x) : x);
}

}  // namespace RAMET_ARCH
}  // namespace ramet
