// Where the threads of a step meet.
#include <chrono>
#include <sched.h>

#include "api.h"

namespace ramet {

namespace {

constexpr int kLateSpins = 4000;       // about a tenth of a millisecond: a mate that is not there by now is late
constexpr int kPatientSpins = 40'000;  // about a millisecond

using Clock = std::chrono::steady_clock;

}  // namespace

// Who waits hardly ever lets others run: to a thread that computes, a yield costs the core for milliseconds, and then the next
// barrier finds this thread missing, and its mates wait in turn.
void Barrier::wait(int size) {
  const uint32_t round = round_.load(std::memory_order_acquire);
  if (waiting_.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
    waiting_.store(0, std::memory_order_relaxed);
    round_.store(round + 1, std::memory_order_release);
    return;
  }
  Clock::time_point late{};
  for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
    if (spins == kLateSpins) late = Clock::now();
    if (spins >= kPatientSpins) sched_yield();
#if defined(__x86_64__)
    else __builtin_ia32_pause();
#endif
  }
  if (late != Clock::time_point{})
    lost_ += std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - late).count();
}

}  // namespace ramet
