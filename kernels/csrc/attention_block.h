// Scores, weights and sums of some query rows over one block of keys. Every row's operations are the same and in the same
// order however many rows are worked on together and wherever its keys are read from.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "kv_format.h"

namespace ramet {
namespace RAMET_ARCH {

inline int padded(int dim) { return (dim + W - 1) / W * W; }

// One cached head of one token, widened as it is read: W values from c on.
template <Format F>
struct CachedHead {
  const uint8_t* from;

  CachedHead(const uint8_t* at, int) : from(at) {}
  vf operator[](int c) const { return load_kv<F>(from + c * kv_bytes(F)); }
};

template <>
struct CachedHead<Format::I8> {
  const int8_t* from;
  vf scale;

  CachedHead(const uint8_t* at, int dim) : from(reinterpret_cast<const int8_t*>(at)) {
    float value;
    std::memcpy(&value, at + dim, 4);
    scale = set1(value);
  }
  vf operator[](int c) const { return mul(scale, load_int8(from + c)); }
};

// What a block's keys or values of one head are read from, in a format and of a size that are whole vectors.
struct BlockHeads {
  const uint8_t* at[kKeyBlock];
  int dim;
};

// Dot products of R query rows with keys [begin, end), each summed in the same order for every R. May run past `end` to the
// next multiple of 8.
template <Format F, int R>
inline void score_rows(const float* query, int stride, const BlockHeads& keys, int begin, int end, float* scores) {
  constexpr int K = R == 1 ? 8 : R == 4 ? 2 : 4;  // keys at a time: as many sums as registers hold
  for (int key = begin; key < end; key += 8) {
    vf sum[R][8];
    for (int some = 0; some < 8; some += K) {
      vf part[K][R];
      for (int j = 0; j < K; ++j)
        for (int r = 0; r < R; ++r) part[j][r] = zero();
      for (int c = 0; c < keys.dim; c += W) {
        vf q[R];
        for (int r = 0; r < R; ++r) q[r] = load(query + r * stride + c);
        for (int j = 0; j < K; ++j) {
          const vf k = CachedHead<F>(keys.at[key + some + j], keys.dim)[c];
          for (int r = 0; r < R; ++r) part[j][r] = fma(q[r], k, part[j][r]);
        }
      }
      for (int j = 0; j < K; ++j)
        for (int r = 0; r < R; ++r) sum[r][some + j] = part[j][r];
    }
    for (int r = 0; r < R; ++r) reduce8(sum[r], scores + r * kKeyBlock + key);
  }
}

// mixed += weights[begin, end) times the values, for C vectors of each row: one chain a lane in key order.
template <Format F, int R, int C>
inline void mix_columns(const float* weights, const BlockHeads& values, int column, int begin, int end, float* mixed,
                        int stride) {
  vf sum[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) sum[r][c] = load(mixed + r * stride + column + c * W);
  for (int key = begin; key < end; ++key) {
    const CachedHead<F> value(values.at[key], values.dim);
    vf p[R];
    for (int r = 0; r < R; ++r) p[r] = set1(weights[r * kKeyBlock + key]);
    for (int c = 0; c < C; ++c) {
      const vf v = value[column + c * W];
      for (int r = 0; r < R; ++r) sum[r][c] = fma(p[r], v, sum[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(mixed + r * stride + column + c * W, sum[r][c]);
}

template <Format F, int R>
inline void mix_rows(const float* weights, const BlockHeads& values, int begin, int end, float* mixed, int stride) {
  if (begin >= end) return;
  constexpr int C = R == 1 ? 8 : R == 4 ? 2 : 4;
  int c = 0;
  for (; c + C * W <= values.dim; c += C * W) mix_columns<F, R, C>(weights, values, c, begin, end, mixed, stride);
  for (; c < values.dim; c += W) mix_columns<F, R, 1>(weights, values, c, begin, end, mixed, stride);
}

// Adds the values of keys [from, to) for R neighbouring rows, each of which sees [first, limit): the keys all of them see
// together, the rest row by row.
template <Format F, int R>
inline void mix_block(const float* weights, const BlockHeads& values, const int32_t* first, const int32_t* limit, int from,
                      int to, float* mixed, int stride) {
  int begin = from, end = to;
  for (int r = 0; r < R; ++r) {
    begin = std::max<int>(begin, first[r]);
    end = std::min<int>(end, limit[r]);
  }
  auto alone = [&](int r, int b, int e) {
    mix_rows<F, 1>(weights + r * kKeyBlock, values, b, e, mixed + r * stride, stride);
  };
  auto begin_of = [&](int r) { return std::max<int>(from, first[r]); };
  auto end_of = [&](int r) { return std::min<int>(to, limit[r]); };
  if (begin >= end) {
    for (int r = 0; r < R; ++r) alone(r, begin_of(r), end_of(r));
    return;
  }
  for (int r = 0; r < R; ++r) alone(r, begin_of(r), begin);
  mix_rows<F, R>(weights, values, begin, end, mixed, stride);
  for (int r = 0; r < R; ++r) alone(r, end, end_of(r));
}

// Calls work(integral_constant R, first row) for all of `rows` rows.
template <class Work>
inline void by_rows(int rows, Work work) {
  int r = 0;
  for (; rows - r >= 3 && rows - r != 4; r += 3) work(std::integral_constant<int, 3>(), r);
  if (rows - r == 4) work(std::integral_constant<int, 4>(), r);
  if (rows - r == 2) work(std::integral_constant<int, 2>(), r);
  if (rows - r == 1) work(std::integral_constant<int, 1>(), r);
}

inline void rescale(float* mixed, int d, float by) {
  if (by == 1.0f) return;
  for (int c = 0; c < d; c += W) store(mixed + c, mul(load(mixed + c), set1(by)));
}

// A row's scores outside keys [first, limit) become `with`.
inline void hide(float* scores, int first, int limit, float with) {
  for (int j = 0; j < first; ++j) scores[j] = with;
  for (int j = limit; j < kKeyBlock; ++j) scores[j] = with;
}

// The largest of a row's scaled scores, which are written back.
inline float scale_scores(float* scores, int first, int limit, const AttentionSpec& s) {
  vf top = set1(-INFINITY);
  for (int j = 0; j < kKeyBlock; j += W) {
    vf x = mul(load(scores + j), set1(s.scale));
    if (s.soft_cap != 0.0f) {  // cap * tanh(x / cap) = cap * (1 - 2 / (exp(2 x / cap) + 1))
      const vf e = exp(mul(x, set1(2.0f / s.soft_cap)));
      x = mul(set1(s.soft_cap), sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f)))));
    }
    store(scores + j, x);
    top = max(top, x);
  }
  if (s.soft_cap != 0.0f) {  // the cap made finite scores of hidden keys
    top = set1(-INFINITY);
    hide(scores, first, limit, -INFINITY);
    for (int j = 0; j < kKeyBlock; j += W) top = max(top, load(scores + j));
  }
  return reduce_max(top);
}

// Scores to weights for each of R rows' keys [first, limit) of the block; the others get weight 0. The rows are taken step by
// step together, since each alone waits for its own results most of the time.
template <int R>
inline void soften(float* scores, const int32_t* first, const int32_t* limit, const AttentionSpec& s, float* peak,
                   float* total, float* mixed, int d) {
  float best[R], anchor[R], keep[R], sum[R];
  for (int r = 0; r < R; ++r) hide(scores + r * kKeyBlock, first[r], limit[r], -INFINITY);
  for (int r = 0; r < R; ++r) best[r] = std::max(peak[r], scale_scores(scores + r * kKeyBlock, first[r], limit[r], s));
  for (int r = 0; r < R; ++r) {
    anchor[r] = std::max(best[r], -FLT_MAX);  // finite, so -inf - anchor is never NaN
    keep[r] = best[r] == peak[r] ? 1.0f : exp_one(peak[r] - anchor[r]);
    peak[r] = best[r];
  }
  for (int j = 0; j < kKeyBlock; j += W)
    for (int r = 0; r < R; ++r) {
      float* some = scores + r * kKeyBlock + j;
      store(some, exp(sub(load(some), set1(anchor[r]))));
    }
  for (int r = 0; r < R; ++r) hide(scores + r * kKeyBlock, first[r], limit[r], 0.0f);
  for (int r = 0; r < R; ++r) {
    vf all = zero();
    for (int j = 0; j < kKeyBlock; j += W) all = add(all, load(scores + r * kKeyBlock + j));
    sum[r] = reduce_add(all);
  }
  for (int r = 0; r < R; ++r) {
    total[r] = total[r] * keep[r] + sum[r];
    rescale(mixed + r * d, d, keep[r]);
  }
}

// The split (peak, total, mixed) joins what the splits before it gave.
inline void merge_split(float peak, float total, const float* mixed, int d, float* peak_to, float* total_to,
                        float* to) {
  const float best = std::max(*peak_to, peak), anchor = std::max(best, -FLT_MAX);
  const float keep = exp_one(*peak_to - anchor), take = exp_one(peak - anchor);
  *total_to = *total_to * keep + total * take;
  for (int c = 0; c < d; c += W)
    store(to + c, add(mul(load(to + c), set1(keep)), mul(load(mixed + c), set1(take))));
  *peak_to = best;
}

inline void write_row(const float* mixed, float total, int dim, float* out) {
  for (int c = 0; c < dim; c += W) store_some(out + c, div(load(mixed + c), set1(total)), dim - c);
}

}  // namespace RAMET_ARCH
}  // namespace ramet
