// Sleeps until one of the watched descriptors is ready. It is edge-triggered: before a thread sleeps, it must have
// tried every descriptor since it last woke.
#pragma once

#include <chrono>
#include <cstdint>

namespace paceline::link {

class Waiter {
  public:
    // Throws std::system_error, like `watch`, when the system has no descriptors or memory left.
    Waiter();
    Waiter(const Waiter&) = delete;
    Waiter& operator=(const Waiter&) = delete;
    ~Waiter();

    void watch(int descriptor);
    // Input on `descriptor` alerts the sleeper, which does not read it.
    void watch_for_alerts(int descriptor);
    // Likewise for a socket of datagrams that say nothing; they are taken as they come.
    void watch_doorbell(int descriptor);
    // Returns after `timeout` at the latest; true when a descriptor alerted the sleeper, or `wake` did.
    bool sleep(std::chrono::milliseconds timeout);
    // Wakes the sleeper, or the next thread to sleep if there is none. May be called from any thread.
    void wake();

  private:
    int epoll_;
    int wake_ = -1;
    int doorbell_ = -1;
};

}  // namespace paceline::link
