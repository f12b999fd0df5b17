#include "shm/news.hpp"

#include "process/fork_guard.hpp"

namespace paceline::shm {

News::Sleeper::Sleeper(News& news) : news_(news) {
    const std::lock_guard hold(news_.mutex_);
    news_.sleepers_.push_back(this);
}

News::Sleeper::~Sleeper() {
    if (forked_from_member()) return;  // the thread that may hold the lock does not exist there
    const std::lock_guard hold(news_.mutex_);
    std::erase(news_.sleepers_, this);
}

void News::Sleeper::sleep(const std::atomic<std::uint32_t>& word, std::uint32_t expected, std::int64_t timeout_ns) {
    // seq_cst, paired with `tell` and the load in `repeat`: one of the two sees the other.
    word_.store(&word, std::memory_order_seq_cst);
    if (news_.count_.load(std::memory_order_seq_cst) == heard_.load(std::memory_order_relaxed))
        futex_wait(word, expected, timeout_ns);
    heard_.store(news_.count(), std::memory_order_relaxed);
    word_.store(nullptr, std::memory_order_release);
}

bool News::repeat() {
    const std::lock_guard hold(mutex_);
    bool anybody = false;
    for (const Sleeper* each : sleepers_) {
        const std::atomic<std::uint32_t>* word = each->word_.load(std::memory_order_seq_cst);
        if (word == nullptr || each->heard_.load(std::memory_order_relaxed) == count()) continue;
        futex_wake_all(*word);
        anybody = true;
    }
    return anybody;
}

}  // namespace paceline::shm
