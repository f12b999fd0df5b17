#include "call/completion_counter.hpp"

#include "shm/futex.hpp"

namespace paceline {

CompletionCounter& CompletionCounter::of_process() {
    static CompletionCounter counter;
    return counter;
}

// Sequentially consistent with `await`: either `announce` reads the watcher, or the watcher's futex reads the new
// count.
void CompletionCounter::announce() {
    count_.fetch_add(1, std::memory_order_seq_cst);
    if (watchers_.load(std::memory_order_seq_cst) != 0) shm::futex_wake_all(count_);
}

void CompletionCounter::await(std::uint32_t seen, std::int64_t timeout_ns) {
    watchers_.fetch_add(1, std::memory_order_seq_cst);
    if (count_.load(std::memory_order_seq_cst) == seen) shm::futex_wait(count_, seen, timeout_ns);
    watchers_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace paceline
