#include "call/call_queue.hpp"

#include <pthread.h>

#include <algorithm>

#include "call/completion_counter.hpp"
#include "call/poll_interval.hpp"
#include "shm/futex.hpp"

namespace paceline {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::int64_t kInterruptCheckNs = std::chrono::nanoseconds(kPollsPerInterruptCheck * kPollInterval).count();
constexpr int kSpinsPerClockRead = 16;  // on some processors one spin takes a microsecond

// Nonzero while a thread in this process busy-waits for a call. The value is `member_fork_count()` plus 1, so that a
// value inherited from the parent process is invalid in a forked child.
std::atomic<std::uint32_t> spinning_process{0};

bool claim_spinning() {
    std::uint32_t seen = spinning_process.load(std::memory_order_relaxed);
    const std::uint32_t mine = 1 + member_fork_count();
    return seen != mine && spinning_process.compare_exchange_strong(seen, mine, std::memory_order_relaxed);
}

enum class SpinResult { over, too_long, lost_core };

// Busy-waits until `is_over` returns true, the time `until` is reached, or another thread has used the core.
template <class IsOver>
SpinResult spin(Clock::time_point until, IsOver is_over) {
    for (auto before = Clock::now(); before < until;) {
        for (int i = 0; i < kSpinsPerClockRead; ++i) {
            if (is_over()) return SpinResult::over;
            shm::cpu_relax();
        }
        const auto now = Clock::now();
        if (now - before > SpinBudget::kLostCore) return SpinResult::lost_core;
        before = now;
    }
    return is_over() ? SpinResult::over : SpinResult::too_long;
}

}  // namespace

bool Work::wait(std::int64_t timeout_ns) const {
    const auto started = Clock::now();
    const auto deadline = started + std::chrono::nanoseconds(timeout_ns);
    if (spins_ && spin(std::min(started + kMaxSpin, deadline), [this] { return done(); }) == SpinResult::over)
        return true;
    while (!done()) {
        const std::int64_t remaining_ns = std::chrono::nanoseconds(deadline - Clock::now()).count();
        if (remaining_ns <= 0) return done();
        std::uint32_t seen = kOpen;
        state_.compare_exchange_strong(seen, kAwaited, std::memory_order_relaxed);
        if (seen != kDone) shm::futex_wait(state_, kAwaited, remaining_ns);
    }
    return true;
}

void Work::finish(Outcome outcome) {
    outcome_ = std::move(outcome);
    // The release pairs with the acquire in `done`. A thread about to sleep has either already set kAwaited or reads
    // kDone.
    if (state_.exchange(kDone, std::memory_order_acq_rel) == kAwaited) shm::futex_wake_all(state_);
    CompletionCounter::of_process().announce();
}

void CallQueue::close() {
    {
        const std::lock_guard lock(queue_mutex_);
        closing_ = true;
        canceled_.store(true, std::memory_order_relaxed);
    }
    queue_version_.fetch_add(1, std::memory_order_relaxed);
    queued_.notify_all();
    {
        const std::lock_guard lock(join_mutex_);
        if (thread_.joinable()) thread_.join();
    }
    const std::lock_guard lock(run_mutex_);  // waits until a call on another thread is complete
}

void CallQueue::arrive(RecordedCall& recorded, const Call& call, bool is_async) {
    const std::uint64_t sequence = 1 + arrived_.fetch_add(1, std::memory_order_relaxed);
    recorded.arrive(recorded_as_.load(std::memory_order_relaxed), call, sequence, is_async);
}

// Runs a call whose start has been recorded; the caller holds `run_mutex_`. Reads the clock only for calls with a
// predicted duration, because such calls take much longer than a clock read.
Outcome CallQueue::perform(Call& call, RecordedCall& recorded, const Interrupted& interrupted, bool background) {
    const bool is_predicted = call.predicted_ns > 0;
    const auto began = is_predicted ? Clock::now() : Clock::time_point();
    Outcome outcome = group_->run(call, interrupted, background);
    recorded.end(call.metrics, outcome);
    if (is_predicted && outcome.code == OutcomeCode::ok)
        prediction_monitor_.note(call, std::chrono::nanoseconds(Clock::now() - began).count());
    return outcome;
}

Outcome CallQueue::run(Call& call, const Interrupted& interrupted) {
    if (pending_.load(std::memory_order_acquire) == 0) {
        std::unique_lock lock(run_mutex_, std::try_to_lock);
        if (!lock.owns_lock()) {
            notify_before_waiting(call);
            lock.lock();
        }
        const Interrupted stopped = [&] { return canceled_.load(std::memory_order_relaxed) || interrupted(); };
        RecordedCall recorded;
        arrive(recorded, call, false);
        return perform(call, recorded, stopped, false);
    }
    notify_before_waiting(call);
    const std::shared_ptr<Work> work = submit(call);
    while (!work->wait(kInterruptCheckNs))
        if (interrupted()) canceled_.store(true, std::memory_order_relaxed);
    return work->outcome();
}

std::shared_ptr<Work> CallQueue::submit(Call call) {
    call.before_waiting = nullptr;  // valid only on the caller's thread
    auto work = std::make_shared<Work>(std::move(call), spins_when_idle_);
    {
        const std::lock_guard lock(queue_mutex_);
        if (closing_) {
            Outcome outcome;
            outcome.code = OutcomeCode::interrupted;
            work->finish(std::move(outcome));
            return work;
        }
        pending_.fetch_add(1, std::memory_order_relaxed);
        arrive(work->recorded_, work->call_, true);
        queue_.push_back(work);
        if (!thread_.joinable()) thread_ = std::thread([this] { this->work(); });
    }
    queue_version_.fetch_add(1, std::memory_order_relaxed);
    queued_.notify_one();
    return work;
}

// Busy-waits for a call for as long as `spin_budget_` allows; the lock is held on entry and on return. Threads that
// queue a call release the lock before they increment `queue_version_`, so this thread does not have to wait for the
// lock when it detects a call.
void CallQueue::spin_for_call(std::unique_lock<std::mutex>& lock) {
    if (spin_budget_.left() == SpinBudget::Duration{0} || !claim_spinning()) return;
    const auto until = Clock::now() + spin_budget_.left();
    auto result = SpinResult::over;
    while (result == SpinResult::over && !closing_ && queue_.empty()) {
        const std::uint32_t seen = queue_version_.load(std::memory_order_relaxed);
        lock.unlock();
        result = spin(until, [this, seen] { return queue_version_.load(std::memory_order_relaxed) != seen; });
        lock.lock();
    }
    if (result == SpinResult::lost_core) spin_budget_.lost_core();
    spinning_process.store(0, std::memory_order_relaxed);
}

void CallQueue::work() {
    pthread_setname_np(pthread_self(), "paceline-work");
    const Interrupted interrupted = [this] { return canceled_.load(std::memory_order_relaxed); };
    std::shared_ptr<Work> next;
    const std::function<bool()> is_awaited = [this, &next] {
        const std::lock_guard looking(queue_mutex_);
        return next->is_awaited() ||
               std::any_of(queue_.begin(), queue_.end(), [](const auto& later) { return later->is_awaited(); });
    };
    std::unique_lock lock(queue_mutex_);
    for (;;) {
        const auto idle_since = Clock::now();
        if (spins_when_idle_) spin_for_call(lock);
        queued_.wait(lock, [this] { return closing_ || !queue_.empty(); });
        spin_budget_.record_wait(Clock::now() - idle_since);
        if (queue_.empty()) return;
        next = std::move(queue_.front());
        queue_.pop_front();
        lock.unlock();
        Outcome outcome;
        {
            const std::lock_guard run(run_mutex_);
            next->recorded_.start();
            next->call_.is_awaited = &is_awaited;
            outcome = perform(next->call_, next->recorded_, interrupted, true);
        }
        // Must precede `finish`, so that a synchronous call made afterward runs on its caller's thread.
        pending_.fetch_sub(1, std::memory_order_release);
        next->finish(std::move(outcome));
        next.reset();
        lock.lock();
    }
}

}  // namespace paceline
