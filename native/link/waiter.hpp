// Makes a thread sleep until one of the watched descriptors is ready. It is edge-triggered: before a thread sleeps, it
// must have tried every descriptor since it last woke up.
#pragma once

#include <chrono>
#include <cstdint>

namespace paceline::link {

class Waiter {
  public:
    // Throws std::system_error, like `watch`, if the system has no descriptors or memory left.
    Waiter();
    Waiter(const Waiter&) = delete;
    Waiter& operator=(const Waiter&) = delete;
    ~Waiter();

    void watch(int descriptor);
    // Input on `descriptor` alerts the sleeping thread, which does not read it.
    void watch_for_alerts(int descriptor);
    // Watches a socket of datagrams without content for alerts; the datagrams are discarded as they arrive.
    void watch_doorbell(int descriptor);
    // Sleeps for at most `timeout`; returns true if a descriptor or `wake` alerted the thread.
    bool sleep(std::chrono::milliseconds timeout);
    // Wakes the sleeping thread or, if there is none, the next thread to sleep. Any thread may call this.
    void wake();

  private:
    int epoll_;
    int wake_ = -1;
    int doorbell_ = -1;
};

}  // namespace paceline::link
