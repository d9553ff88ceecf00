// Norms, rotation, activation, KV stores: one row at a time, each in an order of its own.
#pragma once

#include <cmath>
#include <cstring>

#include "attention.h"
#include "linear.h"

namespace ramet {
namespace RAMET_ARCH {

// normed = weight * t / sqrt(mean(t^2) + eps) with t = x, or x + add (then also written to total). May be in place.
inline void rms_norm_row(const float* x, const float* add_to, const float* weight, float eps, int64_t n, float* normed,
                         float* total) {
  vf sum = zero(), more = zero();
  const float* t = add_to ? total : x;
  for (int64_t i = 0; i < n; i += 2 * W) {
    for (int64_t j = i; j < std::min(n, i + 2 * W); j += W) {
      vf value = load_some(x + j, n - j);
      if (add_to) {
        value = add(value, load_some(add_to + j, n - j));
        store_some(total + j, value, n - j);
      }
      vf& half = j == i ? sum : more;
      half = fma(value, value, half);
    }
  }
  const float mean = reduce_add(add(sum, more)) / static_cast<float>(n);
  const vf scale = set1(1.0f / std::sqrt(mean + eps));
  for (int64_t i = 0; i < n; i += W) {
    const vf value = mul(load_some(t + i, n - i), scale);
    store_some(normed + i, mul(value, load_some(weight + i, n - i)), n - i);
  }
}

inline void rms_norm(Team& team, const float* x, const float* add_to, const float* weight, float eps, int64_t m,
                     int64_t n, float* normed, float* total) {
  int64_t begin, end;
  team.share(m, &begin, &end);
  for (int64_t row = begin * n; row < end * n; row += n)
    rms_norm_row(x + row, add_to ? add_to + row : nullptr, weight, eps, n, normed + row, total ? total + row : nullptr);
}

inline vf silu(vf x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }

inline void silu_mul_some(const float* gate, const float* up, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, mul(silu(load(gate + i)), load(up + i)));
  if (i < n) store_some(out + i, mul(silu(load_some(gate + i, n - i)), load_some(up + i, n - i)), n - i);
}

inline void silu_mul(Team& team, const float* gate_up, int64_t m, int64_t n, float* out) {
  int64_t begin, end;
  team.share(m, &begin, &end);
  for (int64_t row = begin; row < end; ++row)
    silu_mul_some(gate_up + row * 2 * n, gate_up + row * 2 * n + n, n, out + row * n);
}

// Rotates the halves of one head in place.
inline void rope_head(float* x, int64_t dim, const float* cos_sin) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; i += W) {
    const int64_t left = half - i;
    const vf a = load_some(x + i, left), b = load_some(x + half + i, left);
    const vf c = load_some(cos_sin + i, left), s = load_some(cos_sin + half + i, left);
    store_some(x + i, sub(mul(a, c), mul(b, s)), left);
    store_some(x + half + i, add(mul(b, c), mul(a, s)), left);
  }
}

inline void rope(Team& team, float* x, int64_t tokens, int64_t heads, int64_t dim, int64_t stride,
                 const int32_t* positions, const float* cos_sin) {
  int64_t begin, end;
  team.share(tokens * heads, &begin, &end);
  for (int64_t i = begin; i < end; ++i)
    rope_head(x + i / heads * stride + i % heads * dim, dim, cos_sin + positions[i / heads] * dim);
}

// What is stored must be visible to all: the caller syncs before and after.
inline void copy_slots(Team& team, const Step& step, const AttentionSpec& s, const KvPages& kv) {
  const int64_t bytes = s.kv_heads * kv_head_bytes(kv.format, s.dim);
  const auto [begin, end] = team.share(step.n_copies);
  for (int64_t i = begin; i < end; ++i) {
    std::memcpy(kv.k + step.copy_dst[i] * bytes, kv.k + step.copy_src[i] * bytes, bytes);
    std::memcpy(kv.v + step.copy_dst[i] * bytes, kv.v + step.copy_src[i] * bytes, bytes);
  }
}

inline void store_kv(Team& team, const float* k, const float* v, int64_t stride, const Step& step,
                     const AttentionSpec& s, const KvPages& kv) {
  const int64_t bytes = s.kv_heads * kv_head_bytes(kv.format, s.dim);
  const auto [begin, end] = team.share(step.tokens);
  for (int64_t t = begin; t < end; ++t) {
    narrow_heads(kv.format, k + t * stride, s.kv_heads, s.dim, kv.k + step.slots[t] * bytes);
    narrow_heads(kv.format, v + t * stride, s.kv_heads, s.dim, kv.v + step.slots[t] * bytes);
  }
  team.sync();
  if (!step.n_copies) return;
  copy_slots(team, step, s, kv);
  team.sync();
}

// out = exp((x - peak) / temperature); 0 where x is -inf or the result underflows.
inline void exp_row(const float* x, int64_t n, float peak, float temperature, float* out) {
  for (int64_t i = 0; i < n; i += W) {
    const vf power = div(sub(load_some(x + i, n - i, -INFINITY), set1(peak)), set1(temperature));
    store_some(out + i, exp(power), n - i);
  }
  for (int64_t i = 0; i < n; ++i)
    if (!((x[i] - peak) / temperature > -87.0f)) out[i] = 0.0f;
}

}  // namespace RAMET_ARCH
}  // namespace ramet
