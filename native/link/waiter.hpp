// Sleeps until one of the watched descriptors has news. It is edge-triggered: before a thread sleeps, it must have
// tried every descriptor since it last woke.
#pragma once

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
    // Input on `descriptor` wakes the sleeper as news, but the sleeper does not read it.
    void watch_for_news(int descriptor);
    // Returns after `timeout_ms` at the latest; true when a descriptor watched for news had some or `wake` was called.
    bool sleep(int timeout_ms);
    // Wakes the sleeper, or the next thread to sleep if there is none. May be called from any thread.
    void wake();

  private:
    int epoll_;
    int wake_ = -1;
};

}  // namespace paceline::link
