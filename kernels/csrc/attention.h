// Paged attention. A query row (one token, one head) meets its keys in blocks of kKeyBlock aligned to position 0,
// within splits of kKeySplit, always in this order: which tile, thread or pass brings a block cannot change a bit.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "kv_format.h"

namespace ramet {
namespace RAMET_ARCH {

constexpr int64_t kManyTiles = 4;  // a thread: then whole tiles are dealt out, else their heads

inline int padded(int dim) { return (dim + W - 1) / W * W; }

// What one thread works in: kTileRows query rows, their scores, one block of keys or values in float32.
struct TileScratch {
  float *query, *keys, *values, *scores, *peak, *total, *mixed, *merged;

  static int64_t floats(const AttentionSpec& s) {
    const int64_t d = padded(s.dim);
    return d * (3 * kTileRows + 2 * kKeyBlock) + kTileRows * (kKeyBlock + 4);
  }
  TileScratch(float* at, const AttentionSpec& s) {
    const int64_t d = padded(s.dim);
    auto take = [&](int64_t n) {
      float* here = at;
      at += n;
      return here;
    };
    query = take(kTileRows * d);
    keys = take(kKeyBlock * d);
    values = take(kKeyBlock * d);
    scores = take(kTileRows * kKeyBlock);
    mixed = take(kTileRows * d);
    merged = take(kTileRows * d);
    peak = take(2 * kTileRows);
    total = take(2 * kTileRows);
  }
};

// One head's keys or values of one sequence, found through its page table.
struct HeadPages {
  const uint8_t* pool;  // at this head of slot 0
  const int32_t* table;
  int64_t stride;  // bytes from slot to slot
  int page_size;

  HeadPages(const KvPages& kv, const uint8_t* pages, const int32_t* page_table, const AttentionSpec& s, int head)
      : pool(pages + head * kv_head_bytes(kv.format, s.dim)),
        table(page_table),
        stride(s.kv_heads * kv_head_bytes(kv.format, s.dim)),
        page_size(kv.page_size) {}

  // Calls visit(key, bytes) for keys [begin, end).
  template <class Visit>
  void each(int begin, int end, Visit visit) const {
    for (int key = begin; key < end;) {
      const int offset = key % page_size, run = std::min(end - key, page_size - offset);
      const uint8_t* from = pool + (static_cast<int64_t>(table[key / page_size]) * page_size + offset) * stride;
      for (int i = 0; i < run; ++i, ++key, from += stride) visit(key, from);
    }
  }
};

// The rows of keys [begin, end), widened to float32, from to[(begin - block) * padded dim] on.
inline void gather(const HeadPages& pages, Format f, int dim, int block, int begin, int end, float* to) {
  const int d = padded(dim);
  switch (f) {
    case Format::F32:
      return pages.each(begin, end, [&](int k, const uint8_t* x) { widen<Format::F32>(x, dim, to + (k - block) * d); });
    case Format::BF16:
      return pages.each(begin, end, [&](int k, const uint8_t* x) { widen<Format::BF16>(x, dim, to + (k - block) * d); });
    case Format::I8:
      return pages.each(begin, end, [&](int k, const uint8_t* x) { widen_int8(x, dim, to + (k - block) * d); });
    case Format::E4M3:
      return pages.each(begin, end, [&](int k, const uint8_t* x) { widen<Format::E4M3>(x, dim, to + (k - block) * d); });
    case Format::E5M2:
      return pages.each(begin, end, [&](int k, const uint8_t* x) { widen<Format::E5M2>(x, dim, to + (k - block) * d); });
    default:
      return pages.each(begin, end, [&](int k, const uint8_t* x) { widen<Format::F16>(x, dim, to + (k - block) * d); });
  }
}

inline void prefetch(const HeadPages& pages, int64_t row_bytes, int begin, int end) {
  pages.each(begin, end, [&](int, const uint8_t* row) {
    for (int64_t i = 0; i < row_bytes; i += 64) __builtin_prefetch(row + i);
  });
}

// R query rows times 8 / R keys at a time: eight dot products, each summed in the same order for every R.
template <int R>
inline void score_rows(const float* query, const float* keys, int d, int begin, int end, float* scores) {
  constexpr int K = 8 / R;
  for (int key = begin; key < end; key += K) {  // may run past `end`, never past the block
    vf sum[8];
    for (int i = 0; i < 8; ++i) sum[i] = zero();
    for (int c = 0; c < d; c += W) {
      vf k[K];
      for (int j = 0; j < K; ++j) k[j] = load(keys + (key + j) * d + c);
      for (int r = 0; r < R; ++r) {
        const vf q = load(query + r * d + c);
        for (int j = 0; j < K; ++j) sum[r * K + j] = fma(q, k[j], sum[r * K + j]);
      }
    }
    float out[8];
    reduce8(sum, out);
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < K; ++j) scores[r * kKeyBlock + key + j] = out[r * K + j];
  }
}

// mixed += weights[begin, end) times the values, one chain a lane in key order.
template <int R, int C>
inline void mix_columns(const float* weights, const float* values, int d, int begin, int end, float* mixed) {
  vf sum[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) sum[r][c] = load(mixed + r * d + c * W);
  for (int key = begin; key < end; ++key) {
    vf v[C];
    for (int c = 0; c < C; ++c) v[c] = load(values + key * d + c * W);
    for (int r = 0; r < R; ++r) {
      const vf p = set1(weights[r * kKeyBlock + key]);
      for (int c = 0; c < C; ++c) sum[r][c] = fma(p, v[c], sum[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(mixed + r * d + c * W, sum[r][c]);
}

template <int R>
inline void mix_rows(const float* weights, const float* values, int d, int begin, int end, float* mixed) {
  if (begin >= end) return;
  int c = 0;
  constexpr int C = R == 1 ? 8 : R == 2 ? 4 : 2;
  for (; c + C * W <= d; c += C * W) mix_columns<R, C>(weights, values + c, d, begin, end, mixed + c);
  for (; c < d; c += W) mix_columns<R, 1>(weights, values + c, d, begin, end, mixed + c);
}

inline void rescale(float* mixed, int d, float by) {
  if (by == 1.0f) return;
  for (int c = 0; c < d; c += W) store(mixed + c, mul(load(mixed + c), set1(by)));
}

// Scores to weights for keys [first, limit) of the block; the others get weight 0.
inline void soften(float* scores, int first, int limit, const AttentionSpec& s, float* peak, float* total,
                   float* mixed, int d) {
  auto hide = [&](float with) {
    for (int j = 0; j < first; ++j) scores[j] = with;
    for (int j = limit; j < kKeyBlock; ++j) scores[j] = with;
  };
  hide(-INFINITY);
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
    hide(-INFINITY);
    for (int j = 0; j < kKeyBlock; j += W) top = max(top, load(scores + j));
  }
  const float best = std::max(*peak, reduce_max(top));
  const float anchor = std::max(best, -FLT_MAX);  // finite, so -inf - anchor is never NaN
  for (int j = 0; j < kKeyBlock; j += W) store(scores + j, exp(sub(load(scores + j), set1(anchor))));
  hide(0.0f);
  vf sum = zero();
  for (int j = 0; j < kKeyBlock; j += W) sum = add(sum, load(scores + j));
  const float keep = best == *peak ? 1.0f : exp_one(*peak - anchor);
  *total = *total * keep + reduce_add(sum);
  rescale(mixed, d, keep);
  *peak = best;
}

// Adds a block's values for R neighbouring rows: the keys all of them see together, the rest row by row.
template <int R>
inline void mix_block(const float* weights, const float* values, int d, const int32_t* first, const int32_t* limit,
                      float* mixed) {
  int begin = first[0], end = limit[0];
  for (int r = 1; r < R; ++r) {
    begin = std::max<int>(begin, first[r]);
    end = std::min<int>(end, limit[r]);
  }
  if (begin >= end) {
    for (int r = 0; r < R; ++r) mix_rows<1>(weights + r * kKeyBlock, values, d, first[r], limit[r], mixed + r * d);
    return;
  }
  for (int r = 0; r < R; ++r) mix_rows<1>(weights + r * kKeyBlock, values, d, first[r], begin, mixed + r * d);
  mix_rows<R>(weights, values, d, begin, end, mixed);
  for (int r = 0; r < R; ++r) mix_rows<1>(weights + r * kKeyBlock, values, d, end, limit[r], mixed + r * d);
}

// One block of keys [block, block + kKeyBlock), cut to [key_begin, key_end), for all rows of the tile.
inline void visit_block(TileScratch& t, int rows, const Tile& tile, const AttentionPlan& plan, int heads_per_kv,
                        const AttentionSpec& s, const KvPages& kv, int kv_head, int block) {
  const int d = padded(s.dim);
  int32_t first[kTileRows], limit[kTileRows];
  int low = kKeyBlock, high = 0;
  for (int r = 0; r < rows; ++r) {
    const int token = tile.token + r / heads_per_kv;
    first[r] = std::min(std::max(std::max(plan.first[token], tile.key_begin) - block, 0), kKeyBlock);
    limit[r] = std::min(std::max(std::min(plan.limit[token], tile.key_end) - block, 0), kKeyBlock);
    if (first[r] >= limit[r]) first[r] = limit[r] = 0;
    else {
      low = std::min<int>(low, first[r]);
      high = std::max<int>(high, limit[r]);
    }
  }
  if (low >= high) return;
  const int32_t* table = plan.kv_indices + tile.table;
  const HeadPages keys(kv, kv.k, table, s, kv_head), values(kv, kv.v, table, s, kv_head);
  // The heads of a short tile follow each other: the first asks for all of them.
  const bool leads = kv_head == 0 && tile.n_tokens == 1;
  const int64_t row_bytes = leads ? keys.stride : kv_head_bytes(kv.format, s.dim);
  prefetch(values, row_bytes, block + low, block + high);
  gather(keys, kv.format, s.dim, block, block + low, block + high, t.keys);
  const int from = low / 8 * 8;
  int r = 0;
  for (; r + 4 <= rows; r += 4) score_rows<4>(t.query + r * d, t.keys, d, from, high, t.scores + r * kKeyBlock);
  if (rows - r >= 2) {
    score_rows<2>(t.query + r * d, t.keys, d, from, high, t.scores + r * kKeyBlock);
    r += 2;
  }
  if (rows > r) score_rows<1>(t.query + r * d, t.keys, d, from, high, t.scores + r * kKeyBlock);
  for (r = 0; r < rows; ++r)
    if (first[r] < limit[r])
      soften(t.scores + r * kKeyBlock, first[r], limit[r], s, t.peak + r, t.total + r, t.mixed + r * d, d);
  prefetch(keys, row_bytes, block + kKeyBlock, std::min(block + 2 * kKeyBlock, tile.key_end));
  gather(values, kv.format, s.dim, block, block + low, block + high, t.values);
  for (r = 0; r + 4 <= rows; r += 4)
    mix_block<4>(t.scores + r * kKeyBlock, t.values, d, first + r, limit + r, t.mixed + r * d);
  for (; r + 3 <= rows; r += 3)
    mix_block<3>(t.scores + r * kKeyBlock, t.values, d, first + r, limit + r, t.mixed + r * d);
  for (; r < rows; ++r)
    mix_block<1>(t.scores + r * kKeyBlock, t.values, d, first + r, limit + r, t.mixed + r * d);
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

inline float* partial_at(float* partial, int64_t slot, int head, const AttentionSpec& s) {
  return partial + (slot * s.heads + head) * (padded(s.dim) + 2);
}

inline void begin_rows(TileScratch& t, int rows, int d) {
  std::fill(t.peak, t.peak + rows, -INFINITY);
  std::fill(t.total, t.total + rows, 0.0f);
  std::fill(t.mixed, t.mixed + static_cast<int64_t>(rows) * d, 0.0f);
}

class Attention {
 public:
  Attention(const float* q, int64_t stride, const AttentionPlan& plan, const AttentionSpec& spec, const KvPages& kv,
            float* partial, float* out)
      : q_(q), stride_(stride), plan_(plan), s_(spec), kv_(kv), partial_(partial), out_(out) {}

  void run(const Tile& tile, int kv_head, TileScratch& t) const {
    const int group = s_.heads / s_.kv_heads, d = padded(s_.dim), rows = tile.n_tokens * group;
    for (int r = 0; r < rows; ++r) {
      const float* from = q_ + (tile.token + r / group) * stride_ + (kv_head * group + r % group) * s_.dim;
      for (int c = 0; c < d; c += W) store(t.query + r * d + c, load_some(from + c, s_.dim - c));
    }
    if (tile.split >= 0) run_split(tile, kv_head, rows, t);
    else run_all(tile, kv_head, rows, t);
  }

  // The first block of a tile's keys lies where nothing before it has been.
  void ask_for(const Tile& tile) const {
    const HeadPages keys(kv_, kv_.k, plan_.kv_indices + tile.table, s_, 0);
    prefetch(keys, keys.stride, tile.key_begin, std::min(tile.key_begin + kKeyBlock, tile.key_end));
  }

  // All splits of one token and head, in order.
  void merge(int32_t token, int head, TileScratch& t) const {
    const int d = padded(s_.dim), begin = plan_.first[token] / kKeySplit;
    const int end = (plan_.limit[token] + kKeySplit - 1) / kKeySplit;
    const float* part = partial_at(partial_, plan_.partial[token], head, s_);
    float peak = part[0], total = part[1];
    std::memcpy(t.merged, part + 2, d * sizeof(float));
    for (int split = begin + 1; split < end; ++split) {
      part = partial_at(partial_, plan_.partial[token] + split - begin, head, s_);
      merge_split(part[0], part[1], part + 2, d, &peak, &total, t.merged);
    }
    write_row(t.merged, total, s_.dim, out_ + (static_cast<int64_t>(token) * s_.heads + head) * s_.dim);
  }

 private:
  void visit(const Tile& tile, int kv_head, int rows, TileScratch& t, int begin, int end) const {
    for (int block = begin / kKeyBlock * kKeyBlock; block < end; block += kKeyBlock)
      visit_block(t, rows, tile, plan_, s_.heads / s_.kv_heads, s_, kv_, kv_head, block);
  }

  float* slot(const Tile& tile, int row, int kv_head) const {
    const int group = s_.heads / s_.kv_heads, token = tile.token + row / group;
    const int64_t at = plan_.partial[token] + tile.split - plan_.first[token] / kKeySplit;
    return partial_at(partial_, at, kv_head * group + row % group, s_);
  }

  // Goes on from what an earlier pass left where the tile begins inside a split.
  void run_split(const Tile& tile, int kv_head, int rows, TileScratch& t) const {
    const int d = padded(s_.dim), group = s_.heads / s_.kv_heads;
    begin_rows(t, rows, d);
    for (int r = 0; r < rows; ++r) {
      const int start = std::max(plan_.first[tile.token + r / group], tile.split * kKeySplit);
      if (tile.key_begin <= start) continue;
      const float* part = slot(tile, r, kv_head);
      t.peak[r] = part[0];
      t.total[r] = part[1];
      std::memcpy(t.mixed + r * d, part + 2, d * sizeof(float));
    }
    visit(tile, kv_head, rows, t, tile.key_begin, tile.key_end);
    for (int r = 0; r < rows; ++r) {
      const int token = tile.token + r / group;
      if (tile.split < plan_.first[token] / kKeySplit || tile.split * kKeySplit >= plan_.limit[token]) continue;
      float* part = slot(tile, r, kv_head);
      part[0] = t.peak[r];
      part[1] = t.total[r];
      std::memcpy(part + 2, t.mixed + r * d, d * sizeof(float));
    }
  }

  void run_all(const Tile& tile, int kv_head, int rows, TileScratch& t) const {
    const int d = padded(s_.dim), group = s_.heads / s_.kv_heads;
    float* peak = t.peak + kTileRows;
    float* total = t.total + kTileRows;
    for (int split = tile.key_begin / kKeySplit; split * kKeySplit < tile.key_end; ++split) {
      begin_rows(t, rows, d);
      visit(tile, kv_head, rows, t, std::max(tile.key_begin, split * kKeySplit),
            std::min(tile.key_end, (split + 1) * kKeySplit));
      for (int r = 0; r < rows; ++r) {
        const int token = tile.token + r / group, begin = plan_.first[token] / kKeySplit;
        if (split < begin || split * kKeySplit >= plan_.limit[token]) continue;
        if (split == begin) {
          peak[r] = t.peak[r];
          total[r] = t.total[r];
          std::memcpy(t.merged + r * d, t.mixed + r * d, d * sizeof(float));
        } else {
          merge_split(t.peak[r], t.total[r], t.mixed + r * d, d, peak + r, total + r, t.merged + r * d);
        }
      }
    }
    for (int r = 0; r < rows; ++r) {
      const int64_t token = tile.token + r / group, head = kv_head * group + r % group;
      write_row(t.merged + r * d, total[r], s_.dim, out_ + (token * s_.heads + head) * s_.dim);
    }
  }

  const float* q_;
  const int64_t stride_;
  const AttentionPlan& plan_;
  const AttentionSpec& s_;
  const KvPages& kv_;
  float* partial_;
  float* out_;
};

// Calls work(i) for i in [0, n), each once, by whichever thread is free. Ends with a sync.
template <class Work>
inline void take_turns(Team& team, int which, int64_t n, Work work) {
  for (int64_t i = team.counters[which].fetch_add(1); i < n; i = team.counters[which].fetch_add(1)) work(i);
  team.sync();
  if (team.id == 0) team.counters[which].store(0);
}

// The same, but a thread knows what it does next, and calls ask(next) before it works.
template <class Ask, class Work>
inline void take_turns_ahead(Team& team, int which, int64_t n, Ask ask, Work work) {
  std::atomic<int64_t>& counter = team.counters[which];
  for (int64_t i = counter.fetch_add(1); i < n;) {
    const int64_t next = counter.fetch_add(1);
    if (next < n) ask(next);
    work(i);
    i = next;
  }
  team.sync();
  if (team.id == 0) counter.store(0);
}

inline TileScratch own_scratch(const AttentionSpec& spec) {
  thread_local std::vector<float> memory;  // grows to the largest model's tile, then stays
  if (static_cast<int64_t>(memory.size()) < TileScratch::floats(spec)) memory.resize(TileScratch::floats(spec));
  return TileScratch(memory.data(), spec);
}

inline void attend(Team& team, const float* q, int64_t stride, const AttentionPlan& plan, const AttentionSpec& spec,
                   const KvPages& kv, float* partial, float* out) {
  const Attention attention(q, stride, plan, spec, kv, partial, out);
  TileScratch scratch = own_scratch(spec);
  auto tiles = [&](const std::vector<Tile>& list) {
    return [&](int64_t i) { attention.run(list[i / spec.kv_heads], static_cast<int>(i % spec.kv_heads), scratch); };
  };
  if (!plan.shared.empty()) take_turns(team, 0, plan.shared.size() * spec.kv_heads, tiles(plan.shared));
  const int64_t n_own = plan.own.size();
  if (n_own < kManyTiles * team.size) take_turns(team, 1, n_own * spec.kv_heads, tiles(plan.own));
  else
    take_turns_ahead(
        team, 1, n_own, [&](int64_t i) { attention.ask_for(plan.own[i]); },
        [&](int64_t i) {
          for (int head = 0; head < spec.kv_heads; ++head) attention.run(plan.own[i], head, scratch);
        });
  if (plan.merged.empty()) return;
  int64_t begin, end;
  team.share(plan.merged.size() * spec.heads, &begin, &end);
  for (int64_t i = begin; i < end; ++i)
    attention.merge(plan.merged[i / spec.heads], static_cast<int>(i % spec.heads), scratch);
  team.sync();
}

}  // namespace RAMET_ARCH
}  // namespace ramet
