#include "process/fork_guard.hpp"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

namespace paceline {
namespace {

// Protects the list of guards; held during every fork.
std::mutex& fork_mutex() {
    static std::mutex mutex;
    return mutex;
}
std::vector<ForkGuard*>& guards() {
    static std::vector<ForkGuard*> all;
    return all;
}
std::atomic<std::uint32_t> forks{0};

}  // namespace

bool is_forked_from_member() {
    return member_fork_count() != 0;
}

std::uint32_t member_fork_count() {
    return forks.load(std::memory_order_relaxed);
}

ForkGuard::ForkGuard(std::function<void()> close) : close_(std::move(close)) {
    static std::once_flag once;
    std::call_once(once, [] {
        pthread_atfork([] { fork_mutex().lock(); }, [] { fork_mutex().unlock(); }, &ForkGuard::close_in_child);
    });
    const std::lock_guard lock(fork_mutex());
    guards().push_back(this);
}

ForkGuard::~ForkGuard() {
    const std::lock_guard lock(fork_mutex());
    std::erase(guards(), this);
}

void ForkGuard::close() {
    const std::lock_guard lock(fork_mutex());
    if (std::erase(guards(), this) != 0) close_();
}

void ForkGuard::close_in_child() {
    for (const ForkGuard* guard : guards()) guard->close_();
    if (!guards().empty()) forks.fetch_add(1, std::memory_order_relaxed);
    guards().clear();
    fork_mutex().unlock();
}

}  // namespace paceline
