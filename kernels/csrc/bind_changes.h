// What is changed in rows of logits before they are drawn, as Python has it, and its way into a step that runs already.
#pragma once

#include <pybind11/numpy.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>

#include "bind_tensors.h"

namespace ramet {
namespace {

// Changes as `kernels.sampling.LogitAdjust` describes them; their arrays are kept alive while this is.
class Changes {
 public:
  Changes(int64_t rows, int64_t vocab) : of_row_(rows, nullptr), vocab_(vocab) {}
  // `pairs`: (row, change).
  Changes(const py::sequence& pairs, int64_t rows, int64_t vocab) : Changes(rows, vocab) {
    for (const py::handle pair : pairs) {
      const auto [row, change] = pair.cast<std::pair<int64_t, py::object>>();
      add(row, change);
    }
  }

  void add(int64_t row, const py::object& change) {
    TORCH_CHECK(row >= 0 && row < static_cast<int64_t>(of_row_.size()) && !of_row_[row], "row ", row, " of ",
                of_row_.size(), " is changed once at most");
    Adjustment to{};
    to.penalty = change.attr("rep_penalty").cast<float>();
    if (to.penalty != 1.0f) to.rep_ids = array<int64_t>(change.attr("rep_ids"), &to.n_rep);
    to.add_ids = array<int64_t>(change.attr("add_ids"), &to.n_add);
    int64_t n_values = 0;
    if (to.add_ids) to.add_values = array<float>(change.attr("add_values"), &n_values);
    to.mask = array<int32_t>(change.attr("mask"), &to.n_words);
    to.forced = change.attr("forced").cast<int64_t>();
    TORCH_CHECK(to.n_add == n_values && to.forced < vocab_, "a change does not fit the vocabulary");
    check_tokens_in(to.rep_ids, to.n_rep, vocab_);
    check_tokens_in(to.add_ids, to.n_add, vocab_);
    adjustments_.push_back(to);
    of_row_[row] = &adjustments_.back();
  }

  // [rows] null where nothing is changed.
  const Adjustment* const* of_row() const { return of_row_.data(); }

 private:
  // Null for None.
  template <class T>
  const T* array(const py::object& values, int64_t* n) {
    *n = 0;
    if (values.is_none()) return nullptr;
    auto found = py::array_t<T, py::array::c_style | py::array::forcecast>::ensure(values);
    TORCH_CHECK(found, "a change holds something that is no array of numbers");
    *n = found.size();
    kept_.push_back(found);
    return found.data();
  }

  std::vector<const Adjustment*> of_row_;
  std::deque<Adjustment> adjustments_;  // which do not move
  std::vector<py::object> kept_;
  int64_t vocab_;
};

// Changes of a step's late samples. The step computes meanwhile, and waits for them only when it has nothing else to do.
class LateChanges {
 public:
  using Clock = std::chrono::steady_clock;

  // `late`: which of the step's samples they are.
  LateChanges(const py::array_t<bool>& late, int64_t vocab) : place_(late.size(), -1), changes_(0, 0) {
    for (int64_t i = 0; i < late.size(); ++i)
      if (late.at(i)) place_[i] = n_late_++;
    changes_ = Changes(n_late_, vocab);
  }

  // `pairs`: (sample, change). A late sample without a change is drawn as it is.
  void post(const py::sequence& pairs) {
    TORCH_CHECK(state_ == State::Awaited, "late samples are changed once");
    for (const py::handle pair : pairs) {
      const auto [sample, change] = pair.cast<std::pair<int64_t, py::object>>();
      TORCH_CHECK(sample >= 0 && sample < static_cast<int64_t>(place_.size()) && place_[sample] >= 0, "sample ", sample,
                  " is not late");
      changes_.add(place_[sample], change);
    }
    so_far_.store(changes_.of_row(), std::memory_order_release);
    settle(State::Posted);
  }

  // Nothing will come: the step fails instead of waiting.
  void abandon() {
    if (state_ == State::Awaited) settle(State::Abandoned);
  }

  // By every thread of the step's team, without the GIL. False: nothing will come.
  bool wait(const Team& team) {
    if (state_ == State::Awaited) {
      const Clock::time_point begin = Clock::now();
      std::unique_lock<std::mutex> lock(mutex_);
      settled_.wait(lock, [&] { return state_ != State::Awaited; });
      if (team.id == 0) waited_ns_ = std::chrono::nanoseconds(Clock::now() - begin).count();
    }
    return state_ == State::Posted;
  }

  int64_t n_samples() const { return place_.size(); }
  int64_t n_late() const { return n_late_; }
  const Adjustment* const* of_late() const { return changes_.of_row(); }
  // The same once they are posted, null before.
  const std::atomic<const Adjustment* const*>* so_far() const { return &so_far_; }
  int64_t waited_ns() const { return waited_ns_; }
  double waited_s() const { return waited_ns_ * 1e-9; }

 private:
  enum class State { Awaited, Posted, Abandoned };

  void settle(State state) {
    const std::lock_guard<std::mutex> lock(mutex_);
    state_ = state;
    settled_.notify_all();
  }

  std::vector<int64_t> place_;  // [samples] among the late ones; -1 for the others
  int64_t n_late_ = 0;
  Changes changes_;
  std::mutex mutex_;
  std::condition_variable settled_;
  std::atomic<State> state_{State::Awaited};
  std::atomic<const Adjustment* const*> so_far_{nullptr};
  int64_t waited_ns_ = 0;
};

}  // namespace
}  // namespace ramet
