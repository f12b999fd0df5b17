// Decides how long a thread busy-waits for its next call before it sleeps.
//
// Waking a thread takes tens of microseconds. Calls tend to arrive at regular intervals. The thread therefore
// busy-waits for up to twice its previous wait, a strategy that hypervisors use for halt polling. If the previous wait
// was too long, it busy-waits only briefly. If another program used the core during a busy-wait, the thread sleeps
// without busy-waiting before each of its next calls.
#pragma once

#include <algorithm>
#include <chrono>

namespace paceline {

class Patience {
  public:
    using Duration = std::chrono::nanoseconds;
    static constexpr Duration kLeast = std::chrono::microseconds(100);
    static constexpr Duration kMost = std::chrono::milliseconds(2);

    // A gap of this length between clock reads means that the thread lost its core; it normally reads the clock every
    // one or two microseconds.
    static constexpr Duration kLostCore = std::chrono::microseconds(100);
    static constexpr int kCallsWithout = 100;

    // Returns the maximum time to busy-wait for the next call.
    Duration left() const { return calls_without_ > 0 ? Duration{0} : left_; }
    // Records how long the thread waited for a call.
    void learn(Duration waited) {
        left_ = waited > kMost ? kLeast : std::clamp(2 * waited, kLeast, kMost);
        calls_without_ = std::max(0, calls_without_ - 1);
    }
    // Disables busy-waiting for the next `kCallsWithout` calls because the thread lost its core.
    void lost_core() { calls_without_ = kCallsWithout; }

  private:
    Duration left_ = kLeast;
    int calls_without_ = 0;
};

}  // namespace paceline
