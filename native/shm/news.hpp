// Wakes the threads that sleep on words of shared memory when a rank of the host has died or left.
//
// A sleeper shows its word and then looks whether there is news that it has not heard; the teller counts the news and
// then wakes every word that is shown. So either the sleeper sees the count, or the teller sees the word. A wake that
// comes before the sleeper is in the kernel is lost, which is why the teller repeats it until everybody has heard.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "shm/futex.hpp"

namespace paceline::shm {

class News {
  public:
    // Sleeps for one thread at a time.
    class Sleeper {
      public:
        explicit Sleeper(News& news);
        Sleeper(const Sleeper&) = delete;
        Sleeper& operator=(const Sleeper&) = delete;
        ~Sleeper();

        // Sleeps while `word` holds `expected`, at most `timeout_ns`, and returns at once for news since the last
        // sleep. May return early for no reason.
        void sleep(const std::atomic<std::uint32_t>& word, std::uint32_t expected, std::int64_t timeout_ns);

      private:
        friend class News;

        News& news_;
        std::atomic<const std::atomic<std::uint32_t>*> word_{nullptr};  // while it sleeps
        std::atomic<std::uint32_t> heard_{0};
    };

    // How often there was news; an acquire, so that what it tells of is seen.
    std::uint32_t count() const { return count_.load(std::memory_order_acquire); }
    // There is news; call `repeat` next.
    void tell() { count_.fetch_add(1, std::memory_order_seq_cst); }
    // Wakes everybody who sleeps and has not heard the latest; false when there is nobody.
    bool repeat();

  private:
    std::atomic<std::uint32_t> count_{0};
    std::mutex mutex_;
    std::vector<Sleeper*> sleepers_;
};

}  // namespace paceline::shm
