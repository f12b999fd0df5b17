// Wakes who watches many asynchronous calls whenever one of this process's ends.
//
// A watcher takes the count, looks at its calls, and sleeps while the count is still that: an end between the two
// changes it.
#pragma once

#include <atomic>
#include <cstdint>

namespace paceline {

class CompletionCounter {
  public:
    static CompletionCounter& of_process();

    std::uint32_t count() const { return count_.load(std::memory_order_acquire); }
    // After the call says that it is done; a release that pairs with `count`.
    void announce();
    // Sleeps while `count` is `seen`, at most `timeout_ns`; may return early for no reason.
    void await(std::uint32_t seen, std::int64_t timeout_ns);

  private:
    std::atomic<std::uint32_t> count_{0};
    std::atomic<std::uint32_t> watchers_{0};
};

}  // namespace paceline
