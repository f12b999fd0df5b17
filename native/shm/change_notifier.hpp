// Wakes the threads that sleep on words of shared memory when a rank of the host has died or left.
//
// A sleeper publishes the address of its word and then reads the count of changes; the notifier raises the count and
// then wakes every word that is published. Both use sequentially consistent operations, so either the sleeper sees the
// new count and does not sleep, or the notifier sees the word. Between its look at the count and its system call a
// sleeper cannot be woken: the futex compares the word only, which a notification does not change. A wake in that gap
// is lost, so the notifier repeats its wakes until every sleeper has read the new count.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "shm/futex.hpp"

namespace paceline::shm {

class ChangeNotifier {
  public:
    // Sleeps for one thread at a time.
    class Sleeper {
      public:
        explicit Sleeper(ChangeNotifier& notifier);
        Sleeper(const Sleeper&) = delete;
        Sleeper& operator=(const Sleeper&) = delete;
        ~Sleeper();

        // Sleeps while `word` holds `expected`, at most `timeout_ns`, and returns at once after a change since the last
        // sleep. May return early for no reason.
        void sleep(const std::atomic<std::uint32_t>& word, std::uint32_t expected, std::int64_t timeout_ns);

      private:
        friend class ChangeNotifier;

        ChangeNotifier& notifier_;
        std::atomic<const std::atomic<std::uint32_t>*> word_{nullptr};  // while it sleeps
        std::atomic<std::uint32_t> seen_{0};
    };

    // The number of changes. An acquire: the latest change is visible.
    std::uint32_t count() const { return count_.load(std::memory_order_acquire); }
    // Raises the count; call `repeat` next.
    void notify() { count_.fetch_add(1, std::memory_order_seq_cst); }
    // Wakes every sleeper that has not read the latest count; false when there was none.
    bool repeat();

  private:
    std::atomic<std::uint32_t> count_{0};
    std::mutex mutex_;
    std::vector<Sleeper*> sleepers_;
};

}  // namespace paceline::shm
