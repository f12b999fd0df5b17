// Decides how long a thread busy-waits for its next call before it sleeps.
//
// Waking a thread takes tens of microseconds. Calls tend to be made at regular intervals, so the thread waits twice as
// long as it had to wait the last time, like the halt polling of hypervisors; if no call was made in that time, it
// waits only briefly the next time. If another program uses the core in the meantime, there is no core to spare, and
// the thread sleeps at once before its next calls.
#pragma once

#include <algorithm>
#include <chrono>

namespace paceline {

class Patience {
  public:
    using Duration = std::chrono::nanoseconds;
    static constexpr Duration kLeast = std::chrono::microseconds(100);
    static constexpr Duration kMost = std::chrono::milliseconds(2);

    // A thread that keeps its core reads the clock every microsecond or two.
    static constexpr Duration kLostCore = std::chrono::microseconds(100);
    static constexpr int kCallsWithout = 100;

    // The time to wait for the next call.
    Duration left() const { return calls_without_ > 0 ? Duration{0} : left_; }
    // Notes the time that passed before a call was made.
    void learn(Duration waited) {
        left_ = waited > kMost ? kLeast : std::clamp(2 * waited, kLeast, kMost);
        calls_without_ = std::max(0, calls_without_ - 1);
    }
    // Notes that the thread lost its core for a while.
    void lost_core() { calls_without_ = kCallsWithout; }

  private:
    Duration left_ = kLeast;
    int calls_without_ = 0;
};

}  // namespace paceline
