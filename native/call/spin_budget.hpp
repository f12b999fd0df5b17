// Decides how long a thread busy-waits for its next call before it sleeps.
//
// Waking a thread takes tens of microseconds. Calls tend to arrive at regular intervals. The thread therefore
// busy-waits for up to twice its previous wait, a strategy that hypervisors use for halt polling. After a wait of more
// than kMax, it busy-waits only briefly. If another program used the core during a busy-wait, the thread sleeps without
// busy-waiting before each of its next calls.
#pragma once

#include <algorithm>
#include <chrono>

namespace paceline {

class SpinBudget {
  public:
    using Duration = std::chrono::nanoseconds;
    static constexpr Duration kMin = std::chrono::microseconds(100);
    static constexpr Duration kMax = std::chrono::milliseconds(2);

    // A gap of this length between clock reads means that the thread lost its core; it normally reads the clock every
    // one or two microseconds.
    static constexpr Duration kLostCore = std::chrono::microseconds(100);
    static constexpr int kCallsWithoutSpin = 100;

    // Returns the maximum time to busy-wait for the next call.
    Duration left() const { return calls_without_spin_ > 0 ? Duration{0} : left_; }
    // Records how long the thread waited for a call.
    void record_wait(Duration waited) {
        left_ = waited > kMax ? kMin : std::clamp(2 * waited, kMin, kMax);
        calls_without_spin_ = std::max(0, calls_without_spin_ - 1);
    }
    // Disables busy-waiting for the next `kCallsWithoutSpin` calls because the thread lost its core.
    void lost_core() { calls_without_spin_ = kCallsWithoutSpin; }

  private:
    Duration left_ = kMin;
    int calls_without_spin_ = 0;
};

}  // namespace paceline
