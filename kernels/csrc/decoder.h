// A step of a pre-norm decoder in one parallel region: phases between barriers, no allocation once the largest was seen.
#pragma once

#include "head.h"

namespace ramet {
namespace RAMET_ARCH {

constexpr int64_t kFewRows = 2;  // so few rows are sooner prepared by every thread for itself than waited for
constexpr int64_t kGrain = 4;    // panels that one thread takes at least
constexpr int64_t kGateRows = 8;  // rows of some columns that one thread takes at least
constexpr int64_t kAsked = 16 << 10;  // bytes of the next weight that are asked for before its turn

// Rows as a product reads them: float32, or quantised where its weight is.
struct Rows {
  const float* x;
  QuantizedRows quantized;
};

// What a thread prepares for itself alone.
struct OwnRows {
  std::vector<float> x;
  std::vector<int8_t> q;
  std::vector<GroupScale> scales;

  void grow(size_t n) {
    if (x.size() >= n) return;
    x.resize(n);
    q.resize(n);
    scales.resize(n / kGroup + kFewRows);
  }
};

inline OwnRows& own_rows() {
  thread_local OwnRows rows;
  return rows;
}

class Decoder {
 public:
  Decoder(Team& team, const Step& step, const Scratch& scratch, float* hidden)
      : team_(team), step_(step), scratch_(scratch), hidden_(hidden), rows_(step.tokens), own_(own_rows()) {}

  // `next`: the weight that is read after this layer.
  void run(const Layer& layer, const LinearWeight* next) {
    mix(layer);
    think(layer, scratch_.narrow, next);
  }

  // The last layer, and the logits of the chosen tokens. Of the others only keys and values are still needed.
  void finish(const Layer& layer, const Ends& ends) {
    if (team_.id == 0) sort_out(ends);  // the others read it behind barriers
    mix(layer);
    if (!ends.n_chosen) return;
    think(layer, keep(ends, layer.out.k), &ends.head);
    look(ends);
  }

 private:
  // Attention: what the tokens take from each other, in scratch_.narrow.
  void mix(const Layer& layer) {
    multiply(layer.qkv, normed(layer.norm_before_attention, layer.qkv, scratch_.narrow), scratch_.wide, false, &layer.out);
    attention(layer);
  }

  // The rest, for `rows_` tokens each by itself, some at a time.
  void think(const Layer& layer, const float* mixed, const LinearWeight* next) {
    const int64_t rows = rows_;
    float* const hidden = hidden_;
    for (int64_t begin = 0; begin < rows; begin += kRowBlock) {
      rows_ = std::min<int64_t>(kRowBlock, rows - begin);
      hidden_ = hidden + begin * step_.hidden;
      think_of_some(layer, mixed + begin * layer.out.k, next);
    }
    rows_ = rows;
    hidden_ = hidden;
  }

  void think_of_some(const Layer& layer, const float* mixed, const LinearWeight* next) {
    LinearWeight gate_only = layer.gate_up;
    gate_only.n /= 2;
    multiply(layer.out, as_read(mixed, layer.out), hidden_, true, &gate_only);
    gate(layer);
    multiply(layer.down, {scratch_.block, activated(layer.down)}, hidden_, true, next);
  }

  // From here on there are the chosen tokens only. Returns what attention gave them.
  const float* keep(const Ends& ends, int64_t width) {
    float* mixed = scratch_.kept + ends.n_chosen * step_.hidden;
    const auto [begin, end] = team_.share(ends.n_chosen);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t token = ends.chosen[ends.rows->order[i]];
      std::memcpy(scratch_.kept + i * step_.hidden, hidden_ + token * step_.hidden, step_.hidden * sizeof(float));
      std::memcpy(mixed + i * width, scratch_.narrow + token * width, width * sizeof(float));
    }
    team_.sync();
    hidden_ = scratch_.kept;
    rows_ = ends.n_chosen;
    return mixed;
  }

  // Logits: of the first rows all, of the others those that their samples can be.
  void look(const Ends& ends) {
    const LinearWeight& w = ends.head;
    const Rows all = normed(ends.final_norm, w, scratch_.narrow);
    const int64_t n_whole = ends.rows->n_whole, n_narrow = ends.n_chosen - n_whole, panels = n_panels(w);
    if (n_whole)
      together(panels, kGrain, nullptr, [&](Range some) {
        product(some, w, all.x, n_whole, all.quantized, ends.logits, false);
      });
    if (n_narrow)
      together(n_narrow * kParts, 1, nullptr, [&](Range parts) {
        for (int64_t i = parts.begin; i < parts.end; ++i) {
          const int64_t row = n_whole + i / kParts, part = i % kParts;
          const Range some{panels * part / kParts, panels * (part + 1) / kParts};
          narrow_product(some, *ends.rows->narrow[ends.rows->order[row]], w, all.x + row * w.k,
                         row_of(all.quantized, row), ends.logits + row * w.n);
        }
      });
  }
  static QuantizedRows row_of(const QuantizedRows& rows, int64_t row) {
    return {rows.q + row * rows.groups * kGroup, rows.scales + row * rows.groups, rows.groups};
  }

  bool few() const { return rows_ <= kFewRows; }
  QuantizedRows shared(const LinearWeight& w) const { return {scratch_.rows.q, scratch_.rows.scales, w.k / kGroup}; }
  QuantizedRows activated(const LinearWeight& down) const {
    return {scratch_.block_rows.q, scratch_.block_rows.scales, down.k / kGroup};
  }
  QuantizedRows own(const LinearWeight& w) const { return {own_.q.data(), own_.scales.data(), w.k / kGroup}; }

  // Calls work(range) until all of [0, n) is done. Most is dealt out; the rest goes to whoever has time, since threads that
  // share memory and a machine with others are never equally fast.
  template <class Work>
  void together(int64_t n, int64_t grain, const LinearWeight* next, Work work) {
    if (team_.size == 1) return work(Range{0, n});
    std::atomic<int64_t>& counter = team_.counters[2 + turn_];
    const int64_t own = dealt(n, grain), begin = own * team_.size;
    if (own) work(Range{team_.id * own, (team_.id + 1) * own});
    for (Range some = claim(counter, begin, n, grain); some.begin < n; some = claim(counter, begin, n, grain)) work(some);
    if (next && few()) ask_for(*next);
    team_.sync();
    if (team_.id == 0) counter.store(0);
    turn_ ^= 1;
  }
  // The next of [begin, n): less and less, so that all are done at about the same time.
  Range claim(std::atomic<int64_t>& counter, int64_t begin, int64_t n, int64_t grain) const {
    int64_t at = counter.load(), piece;
    do {
      const int64_t left = n - begin - at;
      piece = std::min(left, std::max(grain, left / (2 * team_.size) / grain * grain));
      if (left <= 0) return {n, n};
    } while (!counter.compare_exchange_weak(at, at + piece));
    return {begin + at, begin + at + piece};
  }
  int64_t dealt(int64_t n, int64_t grain) const { return n * 3 / 4 / team_.size / grain * grain; }

  // Memory works while threads wait for each other: the beginning of what this one reads next.
  void ask_for(const LinearWeight& w) const {
    const int64_t panels = n_panels(w), bytes = packed_bytes(w.format, w.n, w.k);
    const int64_t begin = team_.id * dealt(panels, kGrain) * (bytes / panels);
    for (int64_t i = begin; i < std::min(bytes, begin + kAsked); i += 64) __builtin_prefetch(w.packed + i);
  }

  void multiply(const LinearWeight& w, const Rows& rows, float* out, bool accumulate, const LinearWeight* next) {
    together(n_panels(w), kGrain, next, [&](Range panels) {
      product(panels, w, rows.x, rows_, rows.quantized, out, accumulate);
    });
  }

  // Normed hidden states, in the form `next` reads; `room` is for those that all threads share.
  Rows normed(const float* weight, const LinearWeight& next, float* room) {
    const int64_t width = step_.hidden;
    if (few()) own_.grow(rows_ * width);
    float* to = few() ? own_.x.data() : room;
    const QuantizedRows quantized = few() ? own(next) : shared(next);
    const auto [begin, end] = few() ? Range{0, rows_} : team_.share(rows_);
    for (int64_t row = begin; row < end; ++row) {
      rms_norm_row(hidden_ + row * width, nullptr, weight, step_.eps, width, to + row * width, nullptr);
      if (is_quantized(next.format)) quantize_row(to + row * width, row, 0, quantized.groups, quantized);
    }
    if (!few()) team_.sync();
    return {to, quantized};
  }

  // Rows that all threads have written, in the form `next` reads.
  Rows as_read(const float* x, const LinearWeight& next) {
    if (!is_quantized(next.format)) return {x, {}};
    if (few()) own_.grow(rows_ * next.k);
    const QuantizedRows quantized = few() ? own(next) : shared(next);
    const int64_t n = rows_ * quantized.groups;
    const auto [begin, end] = few() ? Range{0, n} : team_.share(n);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / quantized.groups, g = i % quantized.groups;
      quantize_row(x + row * next.k, row, g, g + 1, quantized);
    }
    if (!few()) team_.sync();
    return {x, quantized};
  }

  // Norms and rotates what belongs to one KV head of one token, and stores its key and value.
  void prepare(const Layer& layer, int64_t token, int64_t kv_head) {
    const AttentionSpec& s = layer.spec;
    const int64_t group = s.heads / s.kv_heads, head_bytes = kv_head_bytes(layer.kv.format, s.dim);
    float* row = scratch_.wide + token * layer.qkv.n;
    const float* cos_sin = step_.cos_sin + static_cast<int64_t>(step_.positions[token]) * s.dim;
    auto turn = [&](float* x, const float* weight) {
      if (weight) rms_norm_row(x, nullptr, weight, step_.eps, s.dim, x, nullptr);
      rope_head(x, s.dim, cos_sin);
    };
    for (int64_t i = kv_head * group; i < (kv_head + 1) * group; ++i) turn(row + i * s.dim, layer.q_norm);
    float* key = row + (s.heads + kv_head) * s.dim;
    turn(key, layer.k_norm);
    const int64_t at = (step_.slots[token] * s.kv_heads + kv_head) * head_bytes;
    narrow_heads(layer.kv.format, key, 1, s.dim, layer.kv.k + at);
    narrow_heads(layer.kv.format, key + s.kv_heads * s.dim, 1, s.dim, layer.kv.v + at);
  }

  void attention(const Layer& layer) {
    const AttentionPlan& plan = *layer.plan;
    if (plan.own.size() == 1 && plan.merged.empty() && !step_.n_copies) return attention_by_head(layer);
    const int64_t heads = layer.spec.kv_heads;
    const auto [begin, end] = team_.share(step_.tokens * heads);
    for (int64_t i = begin; i < end; ++i) prepare(layer, i / heads, i % heads);
    team_.sync();
    if (step_.n_copies) {
      copy_slots(team_, step_, layer.spec, layer.kv);
      team_.sync();
    }
    attend(team_, scratch_.wide, layer.qkv.n, plan, layer.spec, layer.kv, scratch_.partial, scratch_.narrow);
  }

  // One tile: who prepares a KV head also attends, so nobody waits in between.
  void attention_by_head(const Layer& layer) {
    const AttentionSpec& s = layer.spec;
    const Attention attention(scratch_.wide, layer.qkv.n, *layer.plan, s, layer.kv, scratch_.partial, scratch_.narrow);
    TileScratch scratch = own_scratch(s);
    take_turns(team_, 0, s.kv_heads, [&](int64_t head) {
      for (int64_t token = 0; token < step_.tokens; ++token) prepare(layer, token, head);
      attention.run_head(layer.plan->own[0], static_cast<int>(head), scratch);
    });
  }

  // silu(gate) * up, in the form the next product reads. Who computes some columns of both also activates them: nobody waits
  // in between, and they never leave the core.
  void gate(const Layer& layer) {
    const LinearWeight& w = layer.gate_up;
    const int64_t n = step_.intermediate;
    if (n % kGroup) return gate_by_halves(layer);
    const Rows rows = normed(layer.norm_before_mlp, w, scratch_.wide);
    const int64_t parts = ceil_div(rows_, kGateRows);
    together(n / kGroup * parts, 1, &layer.down, [&](Range items) {
      for (int64_t at = items.begin; at < items.end;) {
        const int64_t group = at / parts, part = at % parts, stop = std::min(parts, part + items.end - at);
        gate_group(layer, rows, group, {part * kGateRows, std::min(rows_, stop * kGateRows)});
        at += stop - part;
      }
    });
  }

  void gate_group(const Layer& layer, const Rows& all, int64_t group, Range some) {
    const LinearWeight& w = layer.gate_up;
    const int64_t n = step_.intermediate, column = group * kGroup, count = some.end - some.begin;
    const int64_t groups = all.quantized.groups;
    const QuantizedRows quantized{all.quantized.q + some.begin * groups * kGroup, all.quantized.scales + some.begin * groups,
                                  groups};
    const int64_t panels = kGroup / panel_width(w.format);
    float gate[kRowBlock * kGroup], up[kRowBlock * kGroup];
    product({0, panels}, columns(w, column, kGroup), all.x + some.begin * w.k, count, quantized, gate, false);
    product({0, panels}, columns(w, n + column, kGroup), all.x + some.begin * w.k, count, quantized, up, false);
    for (int64_t i = 0; i < count; ++i) {
      float* to = scratch_.block + (some.begin + i) * n + column;
      silu_mul_some(gate + i * kGroup, up + i * kGroup, kGroup, to);
      if (is_quantized(layer.down.format)) quantize_row(to - column, some.begin + i, group, group + 1, activated(layer.down));
    }
  }

  // The same where a group's columns are not whole panels.
  void gate_by_halves(const Layer& layer) {
    const int64_t n = step_.intermediate;
    multiply(layer.gate_up, normed(layer.norm_before_mlp, layer.gate_up, scratch_.block), scratch_.wide, false, nullptr);
    together(rows_, 1, &layer.down, [&](Range some) {
      for (int64_t row = some.begin; row < some.end; ++row) {
        const float* gate = scratch_.wide + row * 2 * n;
        silu_mul_some(gate, gate + n, n, scratch_.block + row * n);
      }
    });
  }

  Team& team_;
  const Step& step_;
  const Scratch& scratch_;
  float* hidden_;
  int64_t rows_;
  int turn_ = 0;
  OwnRows& own_;
};

inline void layers(Team& team, const Layer* all, int64_t n_layers, const Step& step, const Scratch& scratch,
                   float* hidden) {
  Decoder decoder(team, step, scratch, hidden);
  for (int64_t i = 0; i < n_layers; ++i) decoder.run(all[i], i + 1 < n_layers ? &all[i + 1].qkv : nullptr);
}

inline void whole_step(Team& team, const Layer* all, int64_t n_layers, const Step& step, const Scratch& scratch,
                       float* hidden, const Ends& ends, const DrawRows& rows, const Report& report) {
  embed(team, ends.embedding, ends.ids, step.tokens, hidden);
  team.sync();
  Decoder decoder(team, step, scratch, hidden);
  for (int64_t i = 0; i + 1 < n_layers; ++i) decoder.run(all[i], &all[i + 1].qkv);
  decoder.finish(all[n_layers - 1], ends);
  choose(team, rows, report);
}

}  // namespace RAMET_ARCH
}  // namespace ramet
