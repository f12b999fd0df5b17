// Makes a thread sleep until a watched descriptor is ready. Edge-triggered: between two sleeps, a thread must read from
// or write to every descriptor until it would block.
#pragma once

#include <chrono>
#include <cstdint>

namespace paceline::link {

class Waiter {
  public:
    // The constructor and `watch` throw std::system_error if descriptors or memory run out.
    Waiter();
    Waiter(const Waiter&) = delete;
    Waiter& operator=(const Waiter&) = delete;
    ~Waiter();

    void watch(int descriptor);
    // Wakes the sleeping thread when input arrives on `descriptor`; the thread itself does not read this input.
    void watch_for_alerts(int descriptor);
    // Watches a socket that receives empty datagrams; the waiter discards them.
    void watch_doorbell(int descriptor);
    // Sleeps for at most `timeout`; returns true if an alert or `wake` ended the sleep.
    bool sleep(std::chrono::milliseconds timeout);
    // Wakes the sleeping thread or, if there is none, the next thread to sleep. Any thread may call this.
    void wake();

  private:
    int epoll_;
    int wake_ = -1;
    int doorbell_ = -1;
};

}  // namespace paceline::link
