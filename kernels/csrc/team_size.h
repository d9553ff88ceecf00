// How many threads the next step gets. Where other programs want the cores, threads that must meet hundreds of times a
// step wait for each other most of the time, and fewer are faster; the results are the same whatever their number.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ramet {

class TeamSize {
 public:
  explicit TeamSize(int most) : most_(most), size_(most) {}

  // For a step that begins at `now` (nanoseconds).
  int next(int64_t now) {
    if (now >= until_) size_ = most_;  // the other programs may be gone
    return size_;
  }

  // A step that ended at `now` took `wall` nanoseconds, of which its threads together lost `lost` waiting for late mates.
  void note(int64_t now, int64_t wall, int64_t lost) {
    if (size_ == 1) return;
    if (lost <= wall / 2 * (size_ - 1)) {
      if (size_ == most_) pause_ = kShortest;
      return;
    }
    size_ = std::max(1, size_ / 2);
    until_ = now + pause_;
    pause_ = std::min(kLongest, 2 * pause_);
  }

 private:
  static constexpr int64_t kShortest = 100'000'000, kLongest = 1'000'000'000;  // until all are tried again
  int most_, size_;
  int64_t until_ = 0;
  int64_t pause_ = kShortest;
};

}  // namespace ramet
