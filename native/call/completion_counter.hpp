// Wakes threads that watch several asynchronous calls whenever an asynchronous call in this process completes.
//
// A watcher reads the count, checks its calls, and sleeps only while the count is unchanged. A call that completes
// between the check and the sleep changes the count, so no wake-up is lost.
#pragma once

#include <atomic>
#include <cstdint>

namespace paceline {

class CompletionCounter {
  public:
    static CompletionCounter& of_process();

    std::uint32_t count() const { return count_.load(std::memory_order_acquire); }
    // Increments the count; must be called after the call is marked as done. The release pairs with the load in
    // `count`.
    void announce();
    // Sleeps while the count equals `seen`, for at most `timeout_ns`; may wake up spuriously.
    void await(std::uint32_t seen, std::int64_t timeout_ns);

  private:
    std::atomic<std::uint32_t> count_{0};
    std::atomic<std::uint32_t> watchers_{0};
};

}  // namespace paceline
