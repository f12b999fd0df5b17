// Wakes the threads that watch many asynchronous calls whenever one of this process's calls ends.
//
// A watcher reads the count, checks its calls, and sleeps only while the count is unchanged. A call that ends between
// the check and the sleep changes the count, so its wake-up is not lost.
#pragma once

#include <atomic>
#include <cstdint>

namespace paceline {

class CompletionCounter {
  public:
    static CompletionCounter& of_process();

    std::uint32_t count() const { return count_.load(std::memory_order_acquire); }
    // Must be called after the call is marked done; a release that pairs with the load in `count`.
    void announce();
    // Sleeps while `count` is `seen`, for at most `timeout_ns`; may wake up spuriously.
    void await(std::uint32_t seen, std::int64_t timeout_ns);

  private:
    std::atomic<std::uint32_t> count_{0};
    std::atomic<std::uint32_t> watchers_{0};
};

}  // namespace paceline
