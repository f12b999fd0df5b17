// Wakes the threads that sleep on words of shared memory when a rank on the host has died or left.
//
// A sleeper publishes the address of its word and then reads the count of changes; the notifier increments the count
// and then wakes every published word. Both use sequentially consistent operations, so either the sleeper reads the new
// count and does not sleep, or the notifier reads the word. A sleeper cannot be woken between its read of the count and
// its system call: the futex compares only the word, which a notification does not change. A wake-up in this gap is
// lost, so the notifier repeats its wake-ups until every sleeper has read the new count.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "shm/futex.hpp"

namespace paceline::shm {

class ChangeNotifier {
  public:
    // A registered sleeper. Not thread-safe.
    class Sleeper {
      public:
        explicit Sleeper(ChangeNotifier& notifier);
        Sleeper(const Sleeper&) = delete;
        Sleeper& operator=(const Sleeper&) = delete;
        ~Sleeper();

        // Sleeps while `word` equals `expected`, for at most `timeout_ns`. Returns immediately if a change has occurred
        // since the last sleep. May wake up spuriously.
        void sleep(const std::atomic<std::uint32_t>& word, std::uint32_t expected, std::int64_t timeout_ns);

      private:
        friend class ChangeNotifier;

        ChangeNotifier& notifier_;
        std::atomic<const std::atomic<std::uint32_t>*> word_{nullptr};  // the word on which it sleeps, or null
        std::atomic<std::uint32_t> seen_{0};
    };

    // Returns the number of changes. An acquire load: the latest change is visible afterward.
    std::uint32_t count() const { return count_.load(std::memory_order_acquire); }
    // Increments the count; `repeat_wakeups` must be called next.
    void notify() { count_.fetch_add(1, std::memory_order_seq_cst); }
    // Wakes every sleeper that has not read the latest count; returns false if all have.
    bool repeat_wakeups();

  private:
    std::atomic<std::uint32_t> count_{0};
    std::mutex mutex_;
    std::vector<Sleeper*> sleepers_;
};

}  // namespace paceline::shm
