// From a row of logits to a token and its log-probabilities: each number is read once or twice, nothing is sorted whole.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "sampling.h"

namespace ramet {
namespace RAMET_ARCH {

constexpr int64_t kScan = 512;  // logits whose maximum tells whether any of them can matter

inline float block_max(const float* x, int64_t n) {
  vf top = set1(-INFINITY);
  int64_t i = 0;
  for (; i + W <= n; i += W) top = max(load(x + i), top);
  float best = reduce_max(top);
  for (; i < n; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

inline bool any_nan(const float* x, int64_t n) {
  uint32_t found = 0;
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    found |= static_cast<uint32_t>((bits & 0x7fffffff) > 0x7f800000);
  }
  return found != 0;
}

struct Best {
  float value = -INFINITY;  // NaN if any logit is
  int64_t token = 0;        // the lowest of equals
};

inline Best best_of(const float* x, int64_t n) {
  Best best;
  int64_t from = -1;
  for (int64_t begin = 0; begin < n; begin += kScan) {
    const int64_t count = std::min(kScan, n - begin);
    if (any_nan(x + begin, count)) return {NAN, 0};
    const float top = block_max(x + begin, count);
    if (top > best.value) {
      best.value = top;
      from = begin;
    }
  }
  for (int64_t i = from; from >= 0; ++i)
    if (x[i] == best.value) return {best.value, i};
  return best;
}

// What a byte of a mask lets pass: the lesser of a logit and +inf where its bit is set, -inf where it is not.
struct Gates {
  float lanes[256][8];
  Gates() {
    for (int byte = 0; byte < 256; ++byte)
      for (int bit = 0; bit < 8; ++bit) lanes[byte][bit] = byte >> bit & 1 ? INFINITY : -INFINITY;
  }
};

// out = the logits that the mask allows, -inf elsewhere; may be in place. An allowed NaN becomes +inf: no sample either.
inline void allow(const float* x, int64_t n, const int32_t* words, int64_t n_words, float* out) {
  static const Gates gates;
  const int64_t covered = std::min(n, n_words * 32), whole = covered / W * W;
  const auto byte_at = [&](int64_t i) { return static_cast<uint32_t>(words[i / 32]) >> (i % 32 / 8 * 8) & 0xff; };
  float wide[W < 8 ? 8 : W];
  for (int64_t i = 0; i < whole; i += W) {
    const float* gate = gates.lanes[byte_at(i)] + i % 8;
    if (W > 8) {
      for (int64_t lane = 0; lane < W; lane += 8) std::memcpy(wide + lane, gates.lanes[byte_at(i + lane)], 32);
      gate = wide;
    }
    store(out + i, min(load(x + i), load(gate)));  // where x is NaN the second operand counts
  }
  for (int64_t i = whole; i < n; ++i) out[i] = i < covered && (words[i / 32] >> (i % 32) & 1) ? x[i] : -INFINITY;
}

inline void adjust_row(const float* raw, int64_t n, const Adjustment& change, float* out) {
  if (change.mask && !change.n_rep && !change.n_add) return allow(raw, n, change.mask, change.n_words, out);
  std::memcpy(out, raw, n * sizeof(float));
  for (int64_t i = 0; i < change.n_rep; ++i) {
    const float old = raw[change.rep_ids[i]];
    out[change.rep_ids[i]] = old > 0.0f ? old / change.penalty : old * change.penalty;
  }
  for (int64_t i = 0; i < change.n_add; ++i) out[change.add_ids[i]] += change.add_values[i];
  if (change.mask) allow(out, n, change.mask, change.n_words, out);
}

// The `n_top` best tokens, best first; of equals the lower id.
inline void top_of(const float* x, int64_t n, int64_t n_top, std::vector<Weighted>& found) {
  found.clear();
  const size_t wanted = static_cast<size_t>(std::min(n, n_top));
  for (int64_t begin = 0; wanted && begin < n; begin += kScan) {
    const int64_t count = std::min(kScan, n - begin);
    if (found.size() == wanted && !(block_max(x + begin, count) > found.front().weight)) continue;
    for (int64_t i = begin; i < begin + count; ++i) {
      if (found.size() == wanted) {
        if (!(x[i] > found.front().weight)) continue;  // the front is the least of those found
        std::pop_heap(found.begin(), found.end());
        found.pop_back();
      }
      found.push_back({x[i], static_cast<int32_t>(i)});
      std::push_heap(found.begin(), found.end());
    }
  }
  std::sort(found.begin(), found.end());
}

// log of the sum of exp(x), block by block in order.
inline double log_total(const float* x, int64_t n) {
  const float peak = block_max(x, n);
  const vf anchor = set1(peak);
  double total = 0.0;
  for (int64_t begin = 0; begin < n; begin += kScan) {
    const int64_t end = std::min(n, begin + kScan);
    vf sum = zero();
    for (int64_t i = begin; i < end; i += W)
      sum = add(sum, exp(sub(load_some(x + i, end - i, -INFINITY), anchor)));
    total += reduce_add(sum);
  }
  return peak + std::log(total);
}

inline void report_row(const DrawRows& rows, const Report& report, int64_t row, std::vector<Weighted>& found) {
  const float* raw = rows.row(row);
  report.logprobs[row] = NAN;
  if (!report.wanted[row] && report.n_top == 0) return;
  const double total = log_total(raw, rows.vocab);
  if (report.wanted[row]) report.logprobs[row] = static_cast<float>(raw[report.tokens[row]] - total);
  top_of(raw, rows.vocab, report.n_top, found);
  for (int64_t i = 0; i < report.n_top; ++i) {
    const bool there = i < static_cast<int64_t>(found.size());
    report.top_ids[row * report.n_top + i] = there ? found[i].id : -1;
    report.top_logprobs[row * report.n_top + i] = there ? static_cast<float>(found[i].weight - total) : NAN;
  }
}

inline void report(Team& team, const DrawRows& rows, const Report& report) {
  std::vector<Weighted> found;
  for (int64_t row = team.id; row < rows.n; row += team.size) report_row(rows, report, row, found);
}

inline void choose(Team& team, const DrawRows& rows, const Report& report) {
  thread_local std::vector<float> adjusted, weights;
  std::vector<Weighted> order;
  for (int64_t row = team.id; row < rows.n; row += team.size) {
    const Adjustment* change = report.adjust[row];
    if (change && change->forced >= 0) {
      report.tokens[row] = change->forced;
      report.failed[row] = false;
      report_row(rows, report, row, order);
      continue;
    }
    const float* logits = rows.row(row);
    if (change) {
      adjusted.resize(rows.vocab);
      adjust_row(logits, rows.vocab, *change, adjusted.data());
      logits = adjusted.data();
    }
    const Best best = best_of(logits, rows.vocab);
    int64_t token = best.token;
    const bool failed = !std::isfinite(best.value);
    if (!failed && rows.temperature[row] > 0.0f) {
      weights.resize(rows.vocab);
      token = draw_row(rows, row, logits, best.value, weights.data(), order);
    }
    report.tokens[row] = token;
    report.failed[row] = failed;
    report_row(rows, report, row, order);
  }
}

}  // namespace RAMET_ARCH
}  // namespace ramet
