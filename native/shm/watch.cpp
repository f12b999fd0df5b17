#include "shm/watch.hpp"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <utility>
#include <vector>

#include "call/turns.hpp"
#include "process/fork_guard.hpp"
#include "shm/futex.hpp"
#include "shm/post.hpp"

namespace paceline::shm {
namespace {

// From <linux/futex.h> since Linux 5.16; the headers that we are built with may be older.
constexpr long kFutexWaitV = 449;
constexpr std::uint32_t kWord32 = 2;
struct WaitV {
    std::uint64_t expected;
    std::uint64_t address;
    std::uint32_t flags;
    std::uint32_t reserved;
};

constexpr int kManyLooking = 32;  // ranks; if more look, each does so less often
constexpr std::chrono::milliseconds kSeldom{200};
constexpr std::chrono::hours kLong{1};  // somebody else waits for every pulse

WaitV expecting(const std::atomic<std::uint32_t>& word, std::uint32_t value) {
    return {value, reinterpret_cast<std::uintptr_t>(&word), kWord32, 0};
}

// Sleeps until a word is woken or no longer holds its expected value, at most for `timeout`.
void wait_for_any(const std::vector<WaitV>& words, std::chrono::nanoseconds timeout) {
    timespec until{};
    clock_gettime(CLOCK_MONOTONIC, &until);
    const std::int64_t ns = until.tv_nsec + timeout.count();
    until.tv_sec += static_cast<time_t>(ns / 1'000'000'000);
    until.tv_nsec = static_cast<long>(ns % 1'000'000'000);
    syscall(kFutexWaitV, words.data(), static_cast<unsigned>(words.size()), 0, &until, CLOCK_MONOTONIC);
}

}  // namespace

// What one look at all seats has found.
struct Watch::Look {
    int gone = 0;
    bool has_found = false;     // a rank whose end nobody had told of
    bool waits_for_all = true;  // the pulses tell of every rank
    std::vector<std::pair<const std::atomic<std::uint32_t>*, std::uint32_t>> pulses;  // and what they hold
};

bool Watch::is_possible() {
    // A kernel that knows the call rejects an empty list with EINVAL; others return ENOSYS.
    return syscall(kFutexWaitV, nullptr, 0, 0, nullptr, 0) < 0 && errno == EINVAL;
}

Watch::Watch(std::shared_ptr<Board> board, int rank, std::function<void()> changed, bool waits_for_many)
    : board_(std::move(board)), rank_(rank), changed_(std::move(changed)), waits_for_many_(waits_for_many) {
    thread_ = std::thread([this] { run(); });
}

Watch::~Watch() {
    if (forked_from_member()) {
        if (thread_.joinable()) thread_.detach();  // it does not exist in a forked child
        return;
    }
    close();
}

void Watch::close() {
    closing_.store(1, std::memory_order_release);
    futex_wake_all(closing_);  // a thread that looks in every turn sees it then
    if (thread_.joinable()) thread_.join();
}

Watch::Look Watch::look() const {
    Look seen;
    for (int distance = 1; distance < board_->size(); ++distance) {
        const int rank = (rank_ + distance) % board_->size();
        const Seat& seat = board_->seat(rank);
        const State state = seat.state.load(std::memory_order_acquire);
        if (state == State::absent) seen.waits_for_all = false;
        if (is_gone(state)) ++seen.gone;
        if (state != State::present) continue;
        const bool is_mine = distance <= kMostWatchers;
        const std::atomic<std::uint32_t>& word = seat.pulse[is_mine ? distance - 1 : 0].holder;
        const std::uint32_t holder = word.load(std::memory_order_acquire);
        if ((holder & FUTEX_OWNER_DIED) != 0 || (holder == 0 && !Post::is_open(seat.listener))) {
            if (board_->mark_lost(rank)) seen.has_found = true;
            ++seen.gone;
        } else if (holder == 0) {
            seen.waits_for_all = false;
        } else if (is_mine) {
            seen.pulses.emplace_back(&word, holder);
        }
    }
    return seen;
}

// How long a thread that looks around now and then sleeps in between.
std::chrono::milliseconds Watch::seldom_turn() const {
    return std::min(kTurn * (1 + board_->size() / kManyLooking), kSeldom);
}

void Watch::run() {
    pthread_setname_np(pthread_self(), "paceline-watch");
    int known = 0;
    for (;;) {
        const std::uint32_t news = board_->news().load(std::memory_order_acquire);
        if (closing_.load(std::memory_order_acquire) != 0) return;
        Look seen = look();
        if (seen.has_found) board_->tell();
        if (seen.gone != known) {
            known = seen.gone;
            changed_();
            // Many ranks mostly leave one after the other, and each would wake all that are still there.
            if (board_->size() > kManyLooking) futex_wait(closing_, 0, std::chrono::nanoseconds(seldom_turn()).count());
            continue;
        }
        if (!waits_for_many_) {
            futex_wait(board_->news(), news, std::chrono::nanoseconds(kTurn).count());
            continue;
        }
        std::vector<WaitV> words{expecting(board_->news(), news), expecting(closing_, 0)};
        for (const auto& [word, holder] : seen.pulses) words.push_back(expecting(*word, holder));
        if (!seen.waits_for_all)
            wait_for_any(words, seldom_turn());
        else
            wait_for_any(words, board_->size() - 1 > kMostWatchers ? std::chrono::nanoseconds(kSeldom) : kLong);
    }
}

}  // namespace paceline::shm
