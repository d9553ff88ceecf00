// All layers of a pre-norm decoder in one parallel region: phases between barriers, no allocation.
#pragma once

#include "pointwise.h"

namespace ramet {
namespace RAMET_ARCH {

class Decoder {
 public:
  Decoder(Team& team, const Step& step, const Scratch& scratch, float* hidden)
      : team_(team), step_(step), scratch_(scratch), hidden_(hidden) {}

  void run(const Layer& layer) {
    norm(layer.norm_before_attention, layer.qkv);
    multiply(layer.qkv, scratch_.wide, false);
    attention(layer);
    add_product(layer.out);
    norm(layer.norm_before_mlp, layer.gate_up);
    multiply(layer.gate_up, scratch_.wide, false);
    activate(layer.down);
    multiply(layer.down, hidden_, true);
  }

 private:
  QuantizedRows rows_of(const LinearWeight& w) const {
    return {scratch_.rows.q, scratch_.rows.scales, w.k / kGroup};
  }

  // Normed hidden states, in the form `next` reads.
  void norm(const float* weight, const LinearWeight& next) {
    int64_t begin, end;
    team_.share(step_.tokens, &begin, &end);
    for (int64_t row = begin; row < end; ++row) {
      float* to = scratch_.narrow + row * step_.hidden;
      rms_norm_row(hidden_ + row * step_.hidden, nullptr, weight, step_.eps, step_.hidden, to, nullptr);
      if (is_quantized(next.format)) quantize_row(to, row, 0, next.k / kGroup, rows_of(next));
    }
    team_.sync();
  }

  void multiply(const LinearWeight& w, float* out, bool accumulate) {
    product(team_, w, scratch_.narrow, step_.tokens, rows_of(w), out, accumulate);
    team_.sync();
  }

  void add_product(const LinearWeight& w) {
    linear(team_, w, scratch_.narrow, step_.tokens, rows_of(w), hidden_, true);
    team_.sync();
  }

  void attention(const Layer& layer) {
    const AttentionSpec& s = layer.spec;
    const int64_t stride = layer.qkv.n, heads = s.heads + s.kv_heads;
    int64_t begin, end;
    team_.share(step_.tokens * heads, &begin, &end);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t token = i / heads, head = i % heads;
      float* x = scratch_.wide + token * stride + head * s.dim;
      const float* weight = head < s.heads ? layer.q_norm : layer.k_norm;
      if (weight) rms_norm_row(x, nullptr, weight, step_.eps, s.dim, x, nullptr);
      rope_head(x, s.dim, step_.cos_sin + static_cast<int64_t>(step_.positions[token]) * s.dim);
    }
    team_.sync();
    const float* k = scratch_.wide + static_cast<int64_t>(s.heads) * s.dim;
    store_kv(team_, k, k + static_cast<int64_t>(s.kv_heads) * s.dim, stride, step_, s, layer.kv);
    attend(team_, scratch_.wide, stride, *layer.plan, s, layer.kv, scratch_.partial, scratch_.narrow);
  }

  // silu(gate) * up, in the form `next` reads; cut finer than rows so that one row keeps every thread busy.
  void activate(const LinearWeight& next) {
    const int64_t n = step_.intermediate, cut = kGroup * 8, pieces = ceil_div(n, cut);
    int64_t begin, end;
    team_.share(step_.tokens * pieces, &begin, &end);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / pieces, from = i % pieces * cut, count = std::min(cut, n - from);
      const float* gate = scratch_.wide + row * 2 * n + from;
      float* to = scratch_.narrow + row * n + from;
      silu_mul_some(gate, gate + n, count, to);
      if (is_quantized(next.format)) quantize_row(to - from, row, from / kGroup, (from + count) / kGroup, rows_of(next));
    }
    team_.sync();
  }

  Team& team_;
  const Step& step_;
  const Scratch& scratch_;
  float* hidden_;
};

inline void layers(Team& team, const Layer* all, int64_t n_layers, const Step& step, const Scratch& scratch,
                   float* hidden) {
  Decoder decoder(team, step, scratch, hidden);
  for (int64_t i = 0; i < n_layers; ++i) decoder.run(all[i]);
}

}  // namespace RAMET_ARCH
}  // namespace ramet
