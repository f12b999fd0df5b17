#include "call/call_queue.hpp"

#include <pthread.h>

#include "call/completion_counter.hpp"
#include "call/turns.hpp"
#include "shm/futex.hpp"

namespace paceline {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::int64_t kInterruptCheckNs = std::chrono::nanoseconds(kTurnsPerInterruptCheck * kTurn).count();

}  // namespace

bool Work::wait(std::int64_t timeout_ns) const {
    const auto deadline = Clock::now() + std::chrono::nanoseconds(timeout_ns);
    while (!done()) {
        const std::int64_t remaining_ns = std::chrono::nanoseconds(deadline - Clock::now()).count();
        if (remaining_ns <= 0) return done();
        shm::futex_wait(done_, 0, remaining_ns);
    }
    return true;
}

void Work::finish(Outcome outcome) {
    outcome_ = std::move(outcome);
    done_.store(1, std::memory_order_release);
    shm::futex_wake_all(done_);
    CompletionCounter::of_process().announce();
}

void CallQueue::close() {
    {
        const std::lock_guard hold(queueing_);
        closing_ = true;
        cancelled_.store(true, std::memory_order_relaxed);
    }
    queued_.notify_all();
    {
        const std::lock_guard hold(joining_);
        if (thread_.joinable()) thread_.join();
    }
    const std::lock_guard hold(running_);  // waits until a call on another thread has ended
}

void CallQueue::arrive(RecordedCall& recorded, const Call& call, bool is_async) {
    const std::uint64_t sequence = 1 + arrived_.fetch_add(1, std::memory_order_relaxed);
    recorded.arrive(recorded_as_.load(std::memory_order_relaxed), call, sequence, is_async);
}

Outcome CallQueue::run(Call& call, const Interrupted& interrupted) {
    if (pending_.load(std::memory_order_acquire) == 0) {
        std::unique_lock hold(running_, std::try_to_lock);
        if (!hold.owns_lock()) {
            will_wait(call);
            hold.lock();
        }
        const Interrupted stopped = [&] { return cancelled_.load(std::memory_order_relaxed) || interrupted(); };
        RecordedCall recorded;
        arrive(recorded, call, false);
        Outcome outcome = group_->run(call, stopped, false);
        recorded.end(call.observed, outcome);
        return outcome;
    }
    will_wait(call);
    const std::shared_ptr<Work> work = submit(call);
    while (!work->wait(kInterruptCheckNs))
        if (interrupted()) cancelled_.store(true, std::memory_order_relaxed);
    return work->outcome();
}

std::shared_ptr<Work> CallQueue::submit(Call call) {
    call.before_waiting = nullptr;  // it concerns the caller's thread
    auto work = std::make_shared<Work>(std::move(call));
    {
        const std::lock_guard hold(queueing_);
        if (closing_) {
            Outcome outcome;
            outcome.code = Code::interrupted;
            work->finish(std::move(outcome));
            return work;
        }
        pending_.fetch_add(1, std::memory_order_relaxed);
        arrive(work->recorded_, work->call_, true);
        queue_.push_back(work);
        if (!thread_.joinable()) thread_ = std::thread([this] { this->work(); });
    }
    queued_.notify_one();
    return work;
}

void CallQueue::work() {
    pthread_setname_np(pthread_self(), "paceline-work");
    const Interrupted interrupted = [this] { return cancelled_.load(std::memory_order_relaxed); };
    std::unique_lock hold(queueing_);
    for (;;) {
        queued_.wait(hold, [this] { return closing_ || !queue_.empty(); });
        if (queue_.empty()) return;
        const std::shared_ptr<Work> next = std::move(queue_.front());
        queue_.pop_front();
        hold.unlock();
        Outcome outcome;
        {
            const std::lock_guard run(running_);
            next->recorded_.start();
            outcome = group_->run(next->call_, interrupted, true);
            next->recorded_.end(next->call_.observed, outcome);
        }
        // This comes before `finish`, so that a call made after the work is done runs on its caller's thread.
        pending_.fetch_sub(1, std::memory_order_release);
        next->finish(std::move(outcome));
        hold.lock();
    }
}

}  // namespace paceline
