// How many threads the next step gets. Where other programs want the cores, threads that must meet hundreds of times a
// step wait for each other most of the time, and fewer are faster; the results are the same whatever their number.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ramet {

class TeamSize {
 public:
  explicit TeamSize(int most) : most_(most), size_(most) {}

  int next() {
    if (size_ < most_ && left_-- == 0) size_ = most_;  // the others may be gone
    return size_;
  }

  // A step took `wall_ns`, of which its threads together have lost `lost_ns` waiting for late mates.
  void note(int64_t wall_ns, int64_t lost_ns) {
    if (size_ == 1) return;
    if (lost_ns <= wall_ns / 2 * (size_ - 1)) {
      if (size_ == most_) pause_ = kShortest;
      return;
    }
    size_ = std::max(1, size_ / 2);
    left_ = pause_;
    pause_ = std::min(kLongest, 2 * pause_);
  }

 private:
  static constexpr int kShortest = 8, kLongest = 64;  // steps until all are tried again
  int most_, size_;
  int left_ = 0;
  int pause_ = kShortest;
};

}  // namespace ramet
