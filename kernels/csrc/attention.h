// Paged attention. A query row (one token, one head) meets its keys in blocks of kKeyBlock aligned to position 0,
// within splits of kKeySplit, always in this order: which tile, thread or pass brings a block cannot change a bit.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "attention_block.h"

namespace ramet {
namespace RAMET_ARCH {

constexpr int64_t kManyTiles = 4;  // a thread: then whole tiles are dealt out, however long they are
constexpr int kReadAsIs = 24;       // rows of a head: for more, cached keys and values are widened once

// What one thread works in: kTileRows query rows, their scores, one head's keys or values of a block in float32.
struct TileScratch {
  float *query, *widened, *scores, *peak, *total, *mixed, *merged;

  static int64_t floats(const AttentionSpec& s) {
    const int64_t d = padded(s.dim);
    return d * (3 * kTileRows + kKeyBlock) + kTileRows * (kKeyBlock + 4);
  }
  TileScratch(float* at, const AttentionSpec& s) {
    const int64_t d = padded(s.dim);
    auto take = [&](int64_t n) {
      float* here = at;
      at += n;
      return here;
    };
    query = take(kTileRows * d);
    widened = take(kKeyBlock * d);
    scores = take(kTileRows * kKeyBlock);
    mixed = take(kTileRows * d);
    merged = take(kTileRows * d);
    peak = take(2 * kTileRows);
    total = take(2 * kTileRows);
  }
};

// The slots of keys [low, high) of the block that begins at key `block`, as byte offsets into a pool. What is outside stands
// for its nearest neighbour, so all of them may be read.
class BlockSlots {
 public:
  BlockSlots(const KvPages& kv, const int32_t* table, int64_t slot_bytes, int block, int low, int high)
      : low_(low), high_(high) {
    for (int i = low; i < high;) {
      const int key = block + i, offset = key % kv.page_size, stop = std::min(high, i + kv.page_size - offset);
      int64_t from = (static_cast<int64_t>(table[key / kv.page_size]) * kv.page_size + offset) * slot_bytes;
      for (; i < stop; ++i, from += slot_bytes) at_[i] = from;
    }
    std::fill(at_, at_ + low, at_[low]);
    std::fill(at_ + high, at_ + kKeyBlock, at_[high - 1]);
  }

  // `from`: one head of slot 0.
  BlockHeads heads(const uint8_t* from, int dim) const {
    BlockHeads out;
    for (int i = 0; i < kKeyBlock; ++i) out.at[i] = from + at_[i];
    out.dim = dim;
    return out;
  }

  // The same widened to float32 in `to`, for many rows to read.
  template <Format F>
  BlockHeads widened(const uint8_t* from, int dim, float* to) const {
    const int d = padded(dim);
    BlockHeads out;
    for (int i = low_; i < high_; ++i) widen_head<F>(from + at_[i], dim, to + i * d);
    for (int i = 0; i < kKeyBlock; ++i)
      out.at[i] = reinterpret_cast<const uint8_t*>(to + std::min(std::max(i, low_), high_ - 1) * d);
    out.dim = d;
    return out;
  }

  // Asks for a part of `bytes` of every slot, one of `of`.
  void ask(const uint8_t* from, int64_t bytes, int part, int of) const {
    const int n = high_ - low_, end = low_ + n * (part + 1) / of;
    for (int i = low_ + n * part / of; i < end; ++i)
      for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(from + at_[i] + b);
  }

 private:
  int64_t at_[kKeyBlock];
  int low_, high_;
};

inline float* partial_at(float* partial, int64_t slot, int head, const AttentionSpec& s) {
  return partial + (slot * s.heads + head) * (padded(s.dim) + 2);
}

inline void begin_rows(TileScratch& t, int rows, int d) {
  std::fill(t.peak, t.peak + rows, -INFINITY);
  std::fill(t.total, t.total + rows, 0.0f);
  std::fill(t.mixed, t.mixed + static_cast<int64_t>(rows) * d, 0.0f);
}

// KV heads [begin, end) of one tile, which one thread does together, block after block. Rows are those of the first head, then
// those of the next, each token's heads side by side.
struct TileHeads {
  const Tile& tile;
  const Tile* after;  // what its thread does then, if that is known
  int begin, end;
  int group;  // query heads of a KV head

  int n() const { return end - begin; }
  int rows_of_head() const { return tile.n_tokens * group; }
  int rows() const { return n() * rows_of_head(); }
  int token(int row) const { return tile.token + row % rows_of_head() / group; }
  int head(int row) const { return (begin + row / rows_of_head()) * group + row % group; }
};

class Attention {
 public:
  Attention(const float* q, int64_t stride, const AttentionPlan& plan, const AttentionSpec& spec, const KvPages& kv,
            float* partial, float* out)
      : q_(q),
        stride_(stride),
        plan_(plan),
        s_(spec),
        kv_(kv),
        partial_(partial),
        out_(out),
        group_(spec.heads / spec.kv_heads),
        d_(padded(spec.dim)),
        head_bytes_(kv_head_bytes(kv.format, spec.dim)) {}

  // All heads: together where the rows are few, so that a token's heads are read side by side as they lie. `after`: the tile
  // that this thread does next, or null.
  void run(const Tile& tile, const Tile* after, TileScratch& t) const {
    const int heads = s_.kv_heads;
    if (tile.n_tokens * s_.heads <= kTileRows) return run(TileHeads{tile, after, 0, heads, group_}, t);
    for (int i = 0; i < heads; ++i) run(TileHeads{tile, i + 1 == heads ? after : nullptr, i, i + 1, group_}, t);
  }

  void run_head(const Tile& tile, int head, TileScratch& t) const {
    run(TileHeads{tile, nullptr, head, head + 1, group_}, t);
  }

  // All splits of one token and head, in order.
  void merge(int32_t token, int head, TileScratch& t) const {
    const int begin = plan_.first[token] / kKeySplit;
    const int end = (plan_.limit[token] + kKeySplit - 1) / kKeySplit;
    const float* part = partial_at(partial_, plan_.partial[token], head, s_);
    float peak = part[0], total = part[1];
    std::memcpy(t.merged, part + 2, d_ * sizeof(float));
    for (int split = begin + 1; split < end; ++split) {
      part = partial_at(partial_, plan_.partial[token] + split - begin, head, s_);
      merge_split(part[0], part[1], part + 2, d_, &peak, &total, t.merged);
    }
    write_row(t.merged, total, s_.dim, out_ + (static_cast<int64_t>(token) * s_.heads + head) * s_.dim);
  }

 private:
  void run(const TileHeads& h, TileScratch& t) const {
    for (int r = 0; r < h.rows(); ++r) {
      const float* from = q_ + h.token(r) * stride_ + h.head(r) * s_.dim;
      for (int c = 0; c < d_; c += W) store(t.query + r * d_ + c, load_some(from + c, s_.dim - c));
    }
    if (h.tile.split >= 0) run_split(h, t);
    else run_all(h, t);
  }

  void visit(const TileHeads& h, TileScratch& t, int begin, int end) const {
    for (int block = begin / kKeyBlock * kKeyBlock; block < end; block += kKeyBlock) visit_block(h, t, block);
  }

  // One block of keys [block, block + kKeyBlock), cut to the tile's.
  void visit_block(const TileHeads& h, TileScratch& t, int block) const {
    const int rows = h.rows_of_head();  // of each head the same
    int32_t first[kTileRows], limit[kTileRows];
    int low = kKeyBlock, high = 0;
    for (int r = 0; r < rows; ++r) {
      const int token = h.token(r);
      first[r] = std::min(std::max(std::max(plan_.first[token], h.tile.key_begin) - block, 0), kKeyBlock);
      limit[r] = std::min(std::max(std::min(plan_.limit[token], h.tile.key_end) - block, 0), kKeyBlock);
      if (first[r] >= limit[r]) first[r] = limit[r] = 0;
      else {
        low = std::min<int>(low, first[r]);
        high = std::max<int>(high, limit[r]);
      }
    }
    if (low >= high) return;
    const BlockSlots here = slots(h.tile, block), next = what_follows(h, block);
    for (int i = 0; i < h.n(); ++i)
      each_head(here, next, kv_.k, h, i, t, [&](auto format, const BlockHeads& keys, int from, int to) {
        by_rows(rows, [&](auto n, int r) {
          r += i * rows;
          score_rows<format.value, n.value>(t.query + r * d_, d_, keys, std::max(from, low / 8 * 8), std::min(to, high),
                                            t.scores + r * kKeyBlock);
        });
      });
    for (int i = 0; i < h.n(); ++i)
      by_rows(rows, [&](auto n, int r) {
        const int at = i * rows + r;
        soften<n.value>(t.scores + at * kKeyBlock, first + r, limit + r, s_, t.peak + at, t.total + at, t.mixed + at * d_, d_);
      });
    for (int i = 0; i < h.n(); ++i)
      each_head(here, next, kv_.v, h, i, t, [&](auto format, const BlockHeads& values, int from, int to) {
        by_rows(rows, [&](auto n, int r) {
          mix_block<format.value, n.value>(t.scores + (i * rows + r) * kKeyBlock, values, first + r, limit + r, from, to,
                                           t.mixed + (i * rows + r) * d_, d_);
        });
      });
  }

  BlockSlots slots(const Tile& tile, int block) const {
    const int low = std::max(0, tile.key_begin - block), high = std::min(kKeyBlock, tile.key_end - block);
    return BlockSlots(kv_, plan_.kv_indices + tile.table, s_.kv_heads * head_bytes_, block, low, high);
  }

  // The block that is read after this one, of this tile or of the thread's next.
  BlockSlots what_follows(const TileHeads& h, int block) const {
    if (block + kKeyBlock < h.tile.key_end) return slots(h.tile, block + kKeyBlock);
    return h.after ? slots(*h.after, h.after->key_begin / kKeyBlock * kKeyBlock) : slots(h.tile, block);
  }

  // Calls work(integral_constant Format, BlockHeads, from, to) until all keys of one head are done, and asks for `next` in
  // between. Few rows take heads as they are cached, some keys at a time: memory is what they wait for, and it works best
  // when it is asked steadily. For many rows they are widened once.
  template <class Work>
  void each_head(const BlockSlots& here, const BlockSlots& next, const uint8_t* pool, const TileHeads& h, int i,
                 TileScratch& t, Work work) const {
    const uint8_t* all = pool + h.begin * head_bytes_;
    with_format(kv_.format, [&](auto format) {
      if (h.rows_of_head() > kReadAsIs || s_.dim % W) {
        next.ask(all, h.n() * head_bytes_, i, h.n());
        const BlockHeads heads = here.widened<format.value>(all + i * head_bytes_, s_.dim, t.widened);
        return work(std::integral_constant<Format, Format::F32>(), heads, 0, kKeyBlock);
      }
      const BlockHeads heads = here.heads(all + i * head_bytes_, s_.dim);
      constexpr int kParts = kKeyBlock / 8;
      for (int part = 0; part < kParts; ++part) {
        next.ask(all, h.n() * head_bytes_, i * kParts + part, h.n() * kParts);
        work(format, heads, part * 8, part * 8 + 8);
      }
    });
  }

  float* slot(const TileHeads& h, int row) const {
    const int token = h.token(row);
    const int64_t at = plan_.partial[token] + h.tile.split - plan_.first[token] / kKeySplit;
    return partial_at(partial_, at, h.head(row), s_);
  }

  // Goes on from what an earlier pass left where the tile begins inside a split.
  void run_split(const TileHeads& h, TileScratch& t) const {
    const Tile& tile = h.tile;
    begin_rows(t, h.rows(), d_);
    for (int r = 0; r < h.rows(); ++r) {
      const int start = std::max(plan_.first[h.token(r)], tile.split * kKeySplit);
      if (tile.key_begin <= start) continue;
      const float* part = slot(h, r);
      t.peak[r] = part[0];
      t.total[r] = part[1];
      std::memcpy(t.mixed + r * d_, part + 2, d_ * sizeof(float));
    }
    visit(h, t, tile.key_begin, tile.key_end);
    for (int r = 0; r < h.rows(); ++r) {
      const int token = h.token(r);
      if (tile.split < plan_.first[token] / kKeySplit || tile.split * kKeySplit >= plan_.limit[token]) continue;
      float* part = slot(h, r);
      part[0] = t.peak[r];
      part[1] = t.total[r];
      std::memcpy(part + 2, t.mixed + r * d_, d_ * sizeof(float));
    }
  }

  void run_all(const TileHeads& h, TileScratch& t) const {
    const Tile& tile = h.tile;
    float* peak = t.peak + kTileRows;
    float* total = t.total + kTileRows;
    for (int split = tile.key_begin / kKeySplit; split * kKeySplit < tile.key_end; ++split) {
      begin_rows(t, h.rows(), d_);
      visit(h, t, std::max(tile.key_begin, split * kKeySplit), std::min(tile.key_end, (split + 1) * kKeySplit));
      for (int r = 0; r < h.rows(); ++r) {
        const int token = h.token(r), begin = plan_.first[token] / kKeySplit;
        if (split < begin || split * kKeySplit >= plan_.limit[token]) continue;
        if (split == begin) {
          peak[r] = t.peak[r];
          total[r] = t.total[r];
          std::memcpy(t.merged + r * d_, t.mixed + r * d_, d_ * sizeof(float));
        } else {
          merge_split(t.peak[r], t.total[r], t.mixed + r * d_, d_, peak + r, total + r, t.merged + r * d_);
        }
      }
    }
    for (int r = 0; r < h.rows(); ++r) {
      const int64_t token = h.token(r);
      write_row(t.merged + r * d_, total[r], s_.dim, out_ + (token * s_.heads + h.head(r)) * s_.dim);
    }
  }

  const float* q_;
  const int64_t stride_;
  const AttentionPlan& plan_;
  const AttentionSpec& s_;
  const KvPages& kv_;
  float* partial_;
  float* out_;
  const int group_, d_;
  const int64_t head_bytes_;
};

// Calls work(i) for i in [0, n), each once, by whichever thread is free. Ends with a sync.
template <class Work>
inline void take_turns(Team& team, int which, int64_t n, Work work) {
  for (int64_t i = team.counters[which].fetch_add(1); i < n; i = team.counters[which].fetch_add(1)) work(i);
  team.sync();
  if (team.id == 0) team.counters[which].store(0);
}

// The same, but a thread knows what it does next: work(i, next), where `next` is n at the end.
template <class Work>
inline void take_turns_ahead(Team& team, int which, int64_t n, Work work) {
  std::atomic<int64_t>& counter = team.counters[which];
  for (int64_t i = counter.fetch_add(1); i < n;) {
    const int64_t next = std::min(n, counter.fetch_add(1));
    work(i, next);
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

// Whether threads that take whole tiles in their order come out about evenly.
inline bool fit_as_wholes(const std::vector<Tile>& tiles, int threads) {
  if (static_cast<int64_t>(tiles.size()) >= kManyTiles * threads) return true;
  std::vector<int64_t> load(threads, 0);
  int64_t all = 0;
  for (const Tile& tile : tiles) {
    const int64_t cost = static_cast<int64_t>(tile.n_tokens) * (tile.key_end - tile.key_begin);
    *std::min_element(load.begin(), load.end()) += cost;
    all += cost;
  }
  return 6 * threads * *std::max_element(load.begin(), load.end()) <= 7 * all;
}

inline void attend(Team& team, const float* q, int64_t stride, const AttentionPlan& plan, const AttentionSpec& spec,
                   const KvPages& kv, float* partial, float* out) {
  const Attention attention(q, stride, plan, spec, kv, partial, out);
  TileScratch scratch = own_scratch(spec);
  auto deal = [&](int which, const std::vector<Tile>& tiles) {
    const int64_t n = tiles.size(), heads = spec.kv_heads;
    if (fit_as_wholes(tiles, team.size))
      take_turns_ahead(team, which, n, [&](int64_t i, int64_t next) {
        attention.run(tiles[i], next < n ? &tiles[next] : nullptr, scratch);
      });
    else
      take_turns(team, which, n * heads,
                 [&](int64_t i) { attention.run_head(tiles[i / heads], static_cast<int>(i % heads), scratch); });
  };
  if (!plan.shared.empty()) deal(0, plan.shared);
  deal(1, plan.own);
  if (plan.merged.empty()) return;
  int64_t begin, end;
  team.share(plan.merged.size() * spec.heads, &begin, &end);
  for (int64_t i = begin; i < end; ++i)
    attention.merge(plan.merged[i / spec.heads], static_cast<int>(i % spec.heads), scratch);
  team.sync();
}

}  // namespace RAMET_ARCH
}  // namespace ramet
