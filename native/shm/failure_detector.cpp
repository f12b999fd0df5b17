#include "shm/failure_detector.hpp"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <utility>
#include <vector>

#include "call/poll_interval.hpp"
#include "process/fork_guard.hpp"
#include "shm/futex.hpp"
#include "shm/region_exchange.hpp"

namespace paceline::shm {
namespace {

// From <linux/futex.h> since Linux 5.16; the headers used for the build may be older.
constexpr long kFutexWaitV = 449;
constexpr std::uint32_t kWord32 = 2;
struct WaitV {
    std::uint64_t expected;
    std::uint64_t address;
    std::uint32_t flags;
    std::uint32_t reserved;
};

constexpr int kManyRanks = 32;  // number of ranks above which each rank checks less often
constexpr std::chrono::milliseconds kRarePollInterval{200};
constexpr std::chrono::hours kNoPollTimeout{1};  // timeout while the thread is watching every rank

WaitV expecting(const std::atomic<std::uint32_t>& word, std::uint32_t value) {
    return {value, reinterpret_cast<std::uintptr_t>(&word), kWord32, 0};
}

// Sleeps until a word is woken or differs from its expected value, for at most `timeout`.
void wait_for_any(const std::vector<WaitV>& words, std::chrono::nanoseconds timeout) {
    timespec until{};
    clock_gettime(CLOCK_MONOTONIC, &until);
    const std::int64_t ns = until.tv_nsec + timeout.count();
    until.tv_sec += static_cast<time_t>(ns / 1'000'000'000);
    until.tv_nsec = static_cast<long>(ns % 1'000'000'000);
    syscall(kFutexWaitV, words.data(), static_cast<unsigned>(words.size()), 0, &until, CLOCK_MONOTONIC);
}

}  // namespace

// The result of one check of all entries.
struct FailureDetector::ScanResult {
    int gone = 0;
    bool has_found = false;     // whether the check found a rank whose exit had not been reported
    bool waits_for_all = true;  // whether `futexes` covers every rank
    std::vector<std::pair<const std::atomic<std::uint32_t>*, std::uint32_t>> futexes;  // futexes and values
};

bool FailureDetector::is_supported() {
    // A kernel that supports futex_waitv rejects an empty list with EINVAL; other kernels return ENOSYS.
    return syscall(kFutexWaitV, nullptr, 0, 0, nullptr, 0) < 0 && errno == EINVAL;
}

FailureDetector::FailureDetector(std::shared_ptr<HostDirectory> directory, int rank, std::function<void()> changed,
                                 bool uses_futex_waitv)
    : directory_(std::move(directory)), rank_(rank), changed_(std::move(changed)), uses_futex_waitv_(uses_futex_waitv) {
    thread_ = std::thread([this] { run(); });
}

FailureDetector::~FailureDetector() {
    if (is_forked_from_member()) {
        if (thread_.joinable()) thread_.detach();  // the thread does not exist in a forked child
        return;
    }
    close();
}

void FailureDetector::close() {
    closing_.store(1, std::memory_order_release);
    futex_wake_all(closing_);  // a thread that polls reads the flag in its next iteration
    if (thread_.joinable()) thread_.join();
}

FailureDetector::ScanResult FailureDetector::scan() const {
    ScanResult seen;
    for (int distance = 1; distance < directory_->size(); ++distance) {
        const int rank = (rank_ + distance) % directory_->size();
        const RankEntry& entry = directory_->entry(rank);
        const RankState state = entry.state.load(std::memory_order_acquire);
        if (state == RankState::absent) seen.waits_for_all = false;
        if (is_gone(state)) ++seen.gone;
        if (state != RankState::present) continue;
        const bool is_watched = distance <= kMaxWatchers;
        const std::atomic<std::uint32_t>& word = entry.futexes[is_watched ? distance - 1 : 0].holder;
        const std::uint32_t holder = word.load(std::memory_order_acquire);
        if ((holder & FUTEX_OWNER_DIED) != 0 || (holder == 0 && !RegionExchange::is_open(entry.listener))) {
            if (directory_->mark_lost(rank)) seen.has_found = true;
            ++seen.gone;
        } else if (holder == 0) {
            seen.waits_for_all = false;
        } else if (is_watched) {
            seen.futexes.emplace_back(&word, holder);
        }
    }
    return seen;
}

// Returns the interval between two infrequent checks.
std::chrono::milliseconds FailureDetector::rare_poll_interval() const {
    return std::min(kPollInterval * (1 + directory_->size() / kManyRanks), kRarePollInterval);
}

void FailureDetector::run() {
    pthread_setname_np(pthread_self(), "paceline-watch");
    int known = 0;
    for (;;) {
        const std::uint32_t changes = directory_->changes().load(std::memory_order_acquire);
        if (closing_.load(std::memory_order_acquire) != 0) return;
        ScanResult seen = scan();
        if (seen.has_found) directory_->notify();
        if (seen.gone != known) {
            known = seen.gone;
            changed_();
            // Ranks often leave in quick succession; without this pause, each of them would wake all remaining ranks.
            if (directory_->size() > kManyRanks)
                futex_wait(closing_, 0, std::chrono::nanoseconds(rare_poll_interval()).count());
            continue;
        }
        if (!uses_futex_waitv_) {
            futex_wait(directory_->changes(), changes, std::chrono::nanoseconds(kPollInterval).count());
            continue;
        }
        std::vector<WaitV> words{expecting(directory_->changes(), changes), expecting(closing_, 0)};
        for (const auto& [word, holder] : seen.futexes) words.push_back(expecting(*word, holder));
        if (!seen.waits_for_all)
            wait_for_any(words, rare_poll_interval());
        else
            wait_for_any(words, directory_->size() - 1 > kMaxWatchers ? std::chrono::nanoseconds(kRarePollInterval)
                                                                      : kNoPollTimeout);
    }
}

}  // namespace paceline::shm
