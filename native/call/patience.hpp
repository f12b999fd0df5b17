// Decides for how long a thread waits for its next call with its core busy before it sleeps.
//
// To wake a thread takes tens of microseconds. Calls tend to come at the intervals at which they came before, so the
// thread waits twice as long as it had to wait the last time, as the halt polling of hypervisors does; if that was too
// long, it waits only a little the next time. If another program takes the core meanwhile, there is none to spare, and
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

    // Between two looks at the clock, a thread that has its core passes a microsecond or two.
    static constexpr Duration kLostCore = std::chrono::microseconds(100);
    static constexpr int kCallsWithout = 100;

    // How long to wait for the next call.
    Duration left() const { return calls_without_ > 0 ? Duration{0} : left_; }
    // Learns how long it took until a call came.
    void learn(Duration waited) {
        left_ = waited > kMost ? kLeast : std::clamp(2 * waited, kLeast, kMost);
        calls_without_ = std::max(0, calls_without_ - 1);
    }
    // Learns that the thread did not have its core for a while.
    void lost_core() { calls_without_ = kCallsWithout; }

  private:
    Duration left_ = kLeast;
    int calls_without_ = 0;
};

}  // namespace paceline
