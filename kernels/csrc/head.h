// Which logits anybody looks at. Under a grammar few tokens may come at most places (a digit, a brace, one of some words),
// and the logits of all others would be masked: a head's weight is read and multiplied only where it matters.
#pragma once

#include <algorithm>

#include "choosing.h"

namespace ramet {
namespace RAMET_ARCH {

constexpr int64_t kNarrow = 4;  // a row alone takes what it needs sooner than among others, if that is at most 1 / kNarrow
constexpr int64_t kParts = 8;   // of a head, dealt out for each narrow row

// The tokens of a panel that a mask allows.
inline uint32_t allowed_in(const Adjustment& change, int64_t panel, int64_t width) {
  const int64_t word = panel * width / 32;
  if (word >= change.n_words) return 0;
  const uint32_t bits = static_cast<uint32_t>(change.mask[word]) >> (panel * width % 32);
  return width == 32 ? bits : bits & ((1u << width) - 1);
}

// Whether a token that comes with this change needs few panels: none where it is forced, what its mask allows otherwise.
inline bool is_narrow(const Adjustment& change, int64_t panels, int64_t width) {
  if (change.forced >= 0) return true;
  if (!change.mask) return false;
  int64_t left = panels / kNarrow;
  for (int64_t panel = 0; panel < panels && left >= 0; ++panel) left -= allowed_in(change, panel, width) != 0;
  return left >= 0;
}

// Says for every chosen token in which row its logits stand: first those of which all are looked at. By one thread, as late
// as possible, since changes of late samples may come while the step runs.
inline void sort_out(const Ends& ends) {
  ChosenRows& rows = *ends.rows;
  const Adjustment* const* late = ends.late ? ends.late->load(std::memory_order_acquire) : nullptr;
  const int64_t width = panel_width(ends.head.format), panels = n_panels(ends.head);
  rows.narrow.assign(ends.n_chosen, nullptr);
  rows.order.clear();
  std::vector<int64_t> last;
  for (int64_t i = 0; i < ends.n_chosen; ++i) {
    const Adjustment* change = i < ends.n_early ? ends.early[i] : late ? late[i - ends.n_early] : nullptr;
    const bool reported = ends.wanted[i] || ends.n_top > 0;
    const bool narrow = change && !reported && is_narrow(*change, panels, width);
    (narrow ? last : rows.order).push_back(i);
    if (narrow) rows.narrow[i] = change;
  }
  rows.n_whole = rows.order.size();
  rows.order.insert(rows.order.end(), last.begin(), last.end());
  for (int64_t i = 0; i < ends.n_chosen; ++i) rows.place[rows.order[i]] = i;
}

// The logits of one row in some panels, those with no allowed token left as they are.
inline void narrow_product(Range panels, const Adjustment& change, const LinearWeight& w, const float* x,
                           const QuantizedRows& row, float* out) {
  if (change.forced >= 0) return;
  const int64_t width = panel_width(w.format);
  for (int64_t begin = panels.begin; begin < panels.end; ++begin) {
    if (!allowed_in(change, begin, width)) continue;
    int64_t end = begin + 1;
    while (end < panels.end && allowed_in(change, end, width)) ++end;
    product({begin, end}, w, x, 1, row, out, false);
    begin = end;  // which is not needed either
  }
}

}  // namespace RAMET_ARCH
}  // namespace ramet
