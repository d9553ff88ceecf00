// How a step's attention is cut into tiles: arithmetic on page tables, the same for every variant.
#include <algorithm>

#include "api.h"

namespace ramet {

namespace {

constexpr int kShareQueries = 16;  // a row with more query tokens is bound by arithmetic: it shares no pass

int block_floor(int key) { return key / kKeyBlock * kKeyBlock; }

class Planner {
 public:
  Planner(const StepMeta& meta, int heads_per_kv, int window) : meta_(meta) {
    tile_tokens_ = std::max(1, kTileRows / heads_per_kv);
    plan_.kv_indices = meta.kv_indices;
    plan_.limit.resize(meta.tokens);
    plan_.first.resize(meta.tokens);
    plan_.partial.assign(meta.tokens, -1);
    for (int64_t row = 0; row < meta.rows; ++row)
      for (int token = meta.qo_indptr[row]; token < meta.qo_indptr[row + 1]; ++token) {
        const int position = meta.kv_lens[row] - meta.qo_indptr[row + 1] + token;
        plan_.limit[token] = position + 1;
        plan_.first[token] = window < 0 ? 0 : std::max(0, position - window);
      }
  }

  AttentionPlan run() {
    std::vector<int> done(meta_.rows, 0);  // keys a row's group reads for it
    for (int64_t g = 0; g < meta_.groups; ++g) share(meta_.share_indptr[g], meta_.share_indptr[g + 1], g, done.data());
    for (int64_t row = 0; row < meta_.rows; ++row) own(row, done[row]);
    std::sort(plan_.own.begin(), plan_.own.end(), [](const Tile& a, const Tile& b) {  // long tiles first
      const int64_t cost_a = static_cast<int64_t>(a.n_tokens) * (a.key_end - a.key_begin);
      const int64_t cost_b = static_cast<int64_t>(b.n_tokens) * (b.key_end - b.key_begin);
      return cost_a != cost_b ? cost_a > cost_b : a.token != b.token ? a.token < b.token : a.key_begin < b.key_begin;
    });
    for (const auto* list : {&plan_.shared, &plan_.own})
      for (const Tile& tile : *list) plan_.keys_read += visible(tile);
    return std::move(plan_);
  }

 private:
  // Rows [begin, end) have their first pages in common. Neighbours with few query tokens read them together; a long
  // prefill between them is bound by arithmetic and reads for itself.
  void share(int begin, int end, int64_t group, int* done) {
    const int keys = block_floor(meta_.share_n_pages[group] * meta_.page_size);
    auto few = [&](int row) { return meta_.qo_indptr[row + 1] - meta_.qo_indptr[row] <= kShareQueries; };
    for (int row = begin; keys > 0 && row < end;) {
      int stop = row;
      while (stop < end && few(stop)) ++stop;
      if (stop - row >= 2) share_run(row, stop, keys, done);
      row = std::max(stop, row + 1);
    }
  }

  void share_run(int begin, int end, int keys, int* done) {
    for (int row = begin; row < end; ++row) {
      done[row] = keys;
      for (int token = meta_.qo_indptr[row]; token < meta_.qo_indptr[row + 1]; ++token) give_partial(token);
    }
    for (int token = meta_.qo_indptr[begin]; token < meta_.qo_indptr[end]; token += tile_tokens_) {
      const int count = std::min(tile_tokens_, meta_.qo_indptr[end] - token);
      splits(token, count, meta_.kv_indptr[begin], 0, keys, &plan_.shared);
    }
  }

  void give_partial(int token) {
    const int n = (plan_.limit[token] + kKeySplit - 1) / kKeySplit - plan_.first[token] / kKeySplit;
    plan_.partial[token] = plan_.n_partial;
    plan_.n_partial += n;
    plan_.merged.push_back(token);
  }

  void own(int64_t row, int from) {
    const int begin = meta_.qo_indptr[row], end = meta_.qo_indptr[row + 1];
    const bool few = end - begin <= tile_tokens_;  // one tile only: its splits may go to several threads
    for (int token = begin; token < end; token += tile_tokens_) {
      const int count = std::min(tile_tokens_, end - token);
      const int first = std::max(from, block_floor(plan_.first[token])), last = plan_.limit[token + count - 1];
      const bool many = plan_.first[token] / kKeySplit != (last - 1) / kKeySplit;
      if (from > 0) {
        splits(token, count, meta_.kv_indptr[row], first, last, &plan_.own);
      } else if (few && many) {
        for (int t = token; t < token + count; ++t) give_partial(t);
        splits(token, count, meta_.kv_indptr[row], first, last, &plan_.own);
      } else {
        plan_.own.push_back({token, count, meta_.kv_indptr[row], first, last, -1});
      }
    }
  }

  void splits(int token, int count, int64_t table, int begin, int end, std::vector<Tile>* list) {
    for (int key = begin; key < end;) {
      const int stop = std::min(end, (key / kKeySplit + 1) * kKeySplit);
      const Tile tile{token, count, table, key, stop, key / kKeySplit};
      if (visible(tile) > 0) list->push_back(tile);
      key = stop;
    }
  }

  // Keys some token of the tile sees.
  int visible(const Tile& tile) const {
    int low = tile.key_end, high = tile.key_begin;
    for (int token = tile.token; token < tile.token + tile.n_tokens; ++token) {
      low = std::min(low, std::max(tile.key_begin, plan_.first[token]));
      high = std::max(high, std::min(tile.key_end, plan_.limit[token]));
    }
    return std::max(0, high - low);
  }

  const StepMeta& meta_;
  int tile_tokens_;
  AttentionPlan plan_;
};

}  // namespace

AttentionPlan plan_attention(const StepMeta& meta, int heads_per_kv, int window) {
  return Planner(meta, heads_per_kv, window).run();
}

}  // namespace ramet
