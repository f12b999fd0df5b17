// Decides for how long a thread waits for its next call with its core busy before it sleeps.
//
// To wake a thread takes tens of microseconds. Calls tend to come at the intervals at which they came before, so the
// thread waits twice as long as it had to wait the last time, as the halt polling of hypervisors does; if that was too
// long, it waits only a little the next time.
#pragma once

#include <algorithm>
#include <chrono>

namespace paceline {

class Patience {
  public:
    using Duration = std::chrono::nanoseconds;
    static constexpr Duration kLeast = std::chrono::microseconds(100);
    static constexpr Duration kMost = std::chrono::milliseconds(2);

    // How long to wait for the next call.
    Duration left() const { return left_; }
    // Learns how long it took until a call came.
    void learn(Duration waited) { left_ = waited > kMost ? kLeast : std::clamp(2 * waited, kLeast, kMost); }

  private:
    Duration left_ = kLeast;
};

}  // namespace paceline
