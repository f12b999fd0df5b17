// Sleeps until one of some descriptors has news. Edge-triggered: whoever sleeps has tried everything since it last
// woke.
#pragma once

#include <cstdint>

namespace paceline::link {

class Waiter {
  public:
    // Throws std::system_error, as `watch` does, when the system has no descriptors or memory left.
    Waiter();
    Waiter(const Waiter&) = delete;
    Waiter& operator=(const Waiter&) = delete;
    ~Waiter();

    void watch(int descriptor);
    // What comes in on `descriptor` is news for whoever sleeps here, but not for him to read.
    void watch_for_news(int descriptor);
    // Returns after `timeout_ms` at the latest; true when there is news: of a descriptor watched for it, or `wake`.
    bool sleep(int timeout_ms);
    // Wakes a sleeper, or else the next one; from any thread.
    void wake();

  private:
    int epoll_;
    int wake_ = -1;
};

}  // namespace paceline::link
