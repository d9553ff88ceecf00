// A step as it comes from Python, numpy array by numpy array, and what is told of it.
#pragma once

#include <map>

#include "bind_backend.h"

namespace ramet {
namespace {

// One array of a step, by its name there; kept alive while this is.
template <class T>
class Array {
 public:
  Array(const py::object& step, const char* name) {
    const py::object found = step.attr(name);
    TORCH_CHECK(py::isinstance<Exact>(found), name, " is no contiguous array of its type");
    array_ = py::reinterpret_borrow<Exact>(found);
    data_ = array_.data();
    size_ = array_.size();
  }
  const T* data() const { return data_; }
  int64_t size() const { return size_; }
  T operator[](int64_t i) const { return data_[i]; }

 private:
  using Exact = py::array_t<T, py::array::c_style>;
  Exact array_;
  const T* data_;
  int64_t size_;
};

// The arrays of `kernels.base.StepArrays`.
struct StepArrays {
  explicit StepArrays(const py::object& s)
      : qo_indptr(s, "qo_indptr"),
        kv_indptr(s, "kv_indptr"),
        kv_indices(s, "kv_indices"),
        kv_lens(s, "kv_lens"),
        share_indptr(s, "share_indptr"),
        share_n_pages(s, "share_n_pages"),
        positions(s, "positions"),
        token_ids(s, "token_ids"),
        token_row(s, "token_row"),
        table_row(s, "table_row"),
        sample_index(s, "sample_index"),
        sample_row(s, "sample_row"),
        top_k(s, "top_k"),
        slots(s, "slots"),
        copy_src(s, "copy_src"),
        copy_dst(s, "copy_dst"),
        counter(s, "counter"),
        seed(s, "seed"),
        temperature(s, "temperature"),
        top_p(s, "top_p"),
        min_p(s, "min_p"),
        want_logprob(s, "want_logprob"),
        late(s, "late") {
    const int64_t rows = table_row.size(), n = n_samples();
    TORCH_CHECK(qo_indptr.size() == rows + 1 && kv_indptr.size() == rows + 1 && kv_lens.size() == rows,
                "page tables do not match");
    TORCH_CHECK(share_indptr.size() == share_n_pages.size() + 1 || share_n_pages.size() == 0, "groups do not match");
    TORCH_CHECK(qo_indptr[rows] == token_ids.size() && token_row.size() == token_ids.size(),
                "the rows' tokens do not match");
    TORCH_CHECK(sample_row.size() == n && top_k.size() == n && counter.size() == n && seed.size() == n &&
                    temperature.size() == n && top_p.size() == n && min_p.size() == n && want_logprob.size() == n && late.size() == n,
                "expected one value a sample");
  }

  int64_t n_samples() const { return sample_index.size(); }
  StepMeta meta(int page_size) const {
    return {table_row.size(), 0, qo_indptr.data(), kv_indptr.data(), kv_indices.data(), kv_lens.data(),
            share_n_pages.size(), share_indptr.data(), share_n_pages.data(), page_size};
  }

  Array<int32_t> qo_indptr, kv_indptr, kv_indices, kv_lens, share_indptr, share_n_pages, positions, token_ids, token_row,
      table_row, sample_index, sample_row, top_k;
  Array<int64_t> slots, copy_src, copy_dst, counter;
  Array<uint64_t> seed;
  Array<float> temperature, top_p, min_p;
  Array<bool> want_logprob, late;
};

// What the arrays mean: ids with those only the device knows read from its table, and the samples in the order in which
// they are computed, the late ones last.
struct StepRows {
  std::vector<int64_t> ids, order, chosen, table, top_k, seed, counter;
  std::vector<float> temperature, top_p, min_p;
  std::unique_ptr<bool[]> wanted;
  int64_t n_early = 0;

  StepRows(const StepArrays& s, const int64_t* token_table, int64_t n_table, int64_t vocab)
      : wanted(new bool[s.n_samples() + 1]) {
    const int64_t rows = s.table_row.size(), tokens = s.token_ids.size();
    auto place = [&](int64_t row) {
      TORCH_CHECK(row >= 0 && row < rows && s.table_row[row] >= 0 && s.table_row[row] < n_table, "row ", row, " of ",
                  rows, " has no place in the token table");
      return static_cast<int64_t>(s.table_row[row]);
    };
    for (int64_t i = 0; i < tokens; ++i) {
      const int64_t id = s.token_ids[i] == kFromTable ? token_table[place(s.token_row[i])] : s.token_ids[i];
      TORCH_CHECK(id >= 0 && id < vocab, "token ", id, " of a vocabulary of ", vocab);
      ids.push_back(id);
    }
    for (const bool late : {false, true}) {
      for (int64_t i = 0; i < s.n_samples(); ++i)
        if (s.late[i] == late) order.push_back(i);
      if (!late) n_early = order.size();
    }
    for (const int64_t i : order) {
      TORCH_CHECK(s.sample_index[i] >= 0 && s.sample_index[i] < tokens, "sample ", i, " is of no token");
      wanted[chosen.size()] = s.want_logprob[i];
      chosen.push_back(s.sample_index[i]);
      table.push_back(place(s.sample_row[i]));
      top_k.push_back(s.top_k[i]);
      seed.push_back(static_cast<int64_t>(s.seed[i]));
      counter.push_back(s.counter[i]);
      temperature.push_back(s.temperature[i]);
      top_p.push_back(s.top_p[i]);
      min_p.push_back(s.min_p[i]);
    }
  }

  // Some of the samples, in the order in which they are computed; `place`: where each has its logits.
  DrawRows draw(Range some, const float* logits, const int64_t* place, int64_t vocab) const {
    const int64_t at = some.begin;
    return {some.end - at,     vocab,           logits,           place + at,       temperature.data() + at,
            top_k.data() + at, top_p.data() + at, min_p.data() + at, seed.data() + at, counter.data() + at};
  }
  Range early() const { return {0, n_early}; }
  Range late() const { return {n_early, static_cast<int64_t>(order.size())}; }

 private:
  static constexpr int32_t kFromTable = -1;
};

// What is told of a step's samples, in numpy arrays of the types that Python keeps.
class Drawn {
 public:
  Drawn(int64_t n, int64_t n_top)
      : n_top_(n_top),
        tokens_(n),
        logprobs_(n),
        top_ids_({n, n_top}),
        top_logprobs_({n, n_top}),
        failed_(n),
        to_{tokens_.mutable_data(), top_ids_.mutable_data(), logprobs_.mutable_data(), top_logprobs_.mutable_data(),
            failed_.mutable_data()},
        drawn_(n),
        drawn_logprobs_(n),
        drawn_ids_(n * n_top),
        drawn_tops_(n * n_top),
        drawn_failed_(new bool[n + 1]) {}

  // Where some of the samples go first, in the order in which they are computed.
  Report report(Range some, const Adjustment* const* adjust, const StepRows& rows) {
    const int64_t at = some.begin;
    return {adjust, rows.wanted.get() + at, n_top_, drawn_.data() + at, drawn_logprobs_.data() + at,
            drawn_ids_.data() + at * n_top_, drawn_tops_.data() + at * n_top_, drawn_failed_.get() + at};
  }

  // Puts them in their places, and the tokens in the token table.
  void place(const StepRows& rows, int64_t* token_table) {
    for (size_t j = 0; j < rows.order.size(); ++j) {
      const int64_t i = rows.order[j];
      to_.tokens[i] = static_cast<int32_t>(drawn_[j]);
      to_.logprobs[i] = drawn_logprobs_[j];
      to_.failed[i] = drawn_failed_[j];
      for (int64_t k = 0; k < n_top_; ++k) {
        to_.top_ids[i * n_top_ + k] = static_cast<int32_t>(drawn_ids_[j * n_top_ + k]);
        to_.top_logprobs[i * n_top_ + k] = drawn_tops_[j * n_top_ + k];
      }
      token_table[rows.table[j]] = drawn_[j];
    }
  }

  py::tuple tuple() const { return py::make_tuple(tokens_, logprobs_, top_ids_, top_logprobs_, failed_); }

 private:
  struct Places {
    int32_t *tokens, *top_ids;
    float *logprobs, *top_logprobs;
    bool* failed;
  };

  int64_t n_top_;
  py::array_t<int32_t> tokens_;
  py::array_t<float> logprobs_;
  py::array_t<int32_t> top_ids_;
  py::array_t<float> top_logprobs_;
  py::array_t<bool> failed_;
  Places to_;
  std::vector<int64_t> drawn_;
  std::vector<float> drawn_logprobs_;
  std::vector<int64_t> drawn_ids_;
  std::vector<float> drawn_tops_;
  std::unique_ptr<bool[]> drawn_failed_;
};

}  // namespace
}  // namespace ramet
