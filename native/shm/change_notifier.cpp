#include "shm/change_notifier.hpp"

#include "process/fork_guard.hpp"

namespace paceline::shm {

ChangeNotifier::Sleeper::Sleeper(ChangeNotifier& notifier) : notifier_(notifier) {
    const std::lock_guard lock(notifier_.mutex_);
    notifier_.sleepers_.push_back(this);
}

ChangeNotifier::Sleeper::~Sleeper() {
    if (is_forked_from_member()) return;  // a forked child: the thread that may hold the lock does not exist
    const std::lock_guard lock(notifier_.mutex_);
    std::erase(notifier_.sleepers_, this);
}

void ChangeNotifier::Sleeper::sleep(const std::atomic<std::uint32_t>& word, std::uint32_t expected,
                                    std::int64_t timeout_ns) {
    // seq_cst, paired with `notify` and the load in `repeat_wakeups`: at least one side reads the other's store.
    word_.store(&word, std::memory_order_seq_cst);
    if (notifier_.count_.load(std::memory_order_seq_cst) == seen_.load(std::memory_order_relaxed))
        futex_wait(word, expected, timeout_ns);
    seen_.store(notifier_.count(), std::memory_order_relaxed);
    word_.store(nullptr, std::memory_order_release);
}

bool ChangeNotifier::repeat_wakeups() {
    const std::lock_guard lock(mutex_);
    bool anybody = false;
    for (const Sleeper* each : sleepers_) {
        const std::atomic<std::uint32_t>* word = each->word_.load(std::memory_order_seq_cst);
        if (word == nullptr || each->seen_.load(std::memory_order_relaxed) == count()) continue;
        futex_wake_all(*word);
        anybody = true;
    }
    return anybody;
}

}  // namespace paceline::shm
