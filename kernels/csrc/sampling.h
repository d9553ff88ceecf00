// Drawing a token: no order of the vocabulary unless a filter needs one, and then only of its likely end.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "pointwise.h"

namespace ramet {
namespace RAMET_ARCH {

inline uint64_t mix(uint64_t z) {  // the finaliser of splitmix64
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return z ^ z >> 31;
}

struct Weighted {
  float weight;
  int32_t id;
  bool operator<(const Weighted& other) const {  // likelier first, then the lower id
    return weight != other.weight ? weight > other.weight : id < other.id;
  }
};

// Zeroes what top-k, and then top-p of the rest, take away. `order` is memory to work in.
inline void cut_tail(float* weights, int64_t n, int64_t top_k, float top_p, std::vector<Weighted>& order) {
  order.clear();
  for (int64_t i = 0; i < n; ++i)
    if (weights[i] > 0.0f) order.push_back({weights[i], static_cast<int32_t>(i)});
  if (top_k > 0 && top_k < static_cast<int64_t>(order.size())) {
    std::nth_element(order.begin(), order.begin() + top_k, order.end());
    order.resize(top_k);
  }
  if (top_p < 1.0f) {
    double total = 0.0, before = 0.0;
    for (const Weighted& w : order) total += w.weight;
    const double enough = static_cast<double>(top_p) * total;
    size_t sorted = 0, kept = 0;
    while (kept < order.size() && (kept == 0 || before < enough)) {
      if (kept == sorted) {  // order the next few: each time as many again
        sorted = std::min(order.size(), std::max<size_t>(64, 2 * sorted));
        std::nth_element(order.begin() + kept, order.begin() + sorted - 1, order.end());
        std::sort(order.begin() + kept, order.begin() + sorted);
      }
      before += order[kept++].weight;
    }
    order.resize(kept);
  }
  std::fill(weights, weights + n, 0.0f);
  for (const Weighted& w : order) weights[w.id] = w.weight;
}

// The exponential race: the token that minimises E / weight, E = -log1p(-u), u a hash of (key, token). As E >= u, most
// tokens are out before any logarithm.
inline int64_t race(const float* weights, int64_t n, float least, uint64_t key) {
  constexpr uint64_t golden = 0x9E3779B97F4A7C15u;
  double best = -1.0;
  int64_t winner = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (!(weights[i] > 0.0f) || weights[i] < least) continue;
    const uint64_t bits = mix(key + static_cast<uint64_t>(i + 1) * golden);
    const double u = (static_cast<double>(bits >> 11) + 0.5) * 0x1p-53, weight = weights[i];
    if (u * best >= weight) continue;
    const double score = weight / -std::log1p(-u);
    if (score > best) {
      best = score;
      winner = i;
    }
  }
  return winner;
}

// A draw from logits with a finite peak. `weights` [vocab] and `order` are memory to work in.
inline int64_t draw_row(const DrawRows& rows, int64_t row, const float* logits, float peak, float* weights,
                        std::vector<Weighted>& order) {
  constexpr uint64_t golden = 0x9E3779B97F4A7C15u;
  exp_row(logits, rows.vocab, peak, std::max(rows.temperature[row], 1e-6f), weights);
  const int64_t top_k = rows.top_k[row] < rows.vocab ? rows.top_k[row] : 0;
  if (top_k > 0 || rows.top_p[row] < 1.0f) cut_tail(weights, rows.vocab, top_k, rows.top_p[row], order);
  const uint64_t seed = static_cast<uint64_t>(rows.seed[row]), counter = static_cast<uint64_t>(rows.counter[row]);
  const uint64_t key = mix(mix(seed + golden) ^ counter * golden);
  return race(weights, rows.vocab, rows.min_p[row], key);
}

inline void draw(Team& team, const DrawRows& rows, int64_t* tokens) {
  std::vector<float> weights(rows.vocab);
  std::vector<Weighted> order;
  for (int64_t row = team.id; row < rows.n; row += team.size) {
    const float* logits = rows.row(row);
    float peak = -INFINITY;
    for (int64_t i = 0; i < rows.vocab; ++i) peak = std::max(peak, logits[i]);
    tokens[row] = draw_row(rows, row, logits, peak, weights.data(), order);
  }
}

}  // namespace RAMET_ARCH
}  // namespace ramet
