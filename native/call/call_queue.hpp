// Runs a group's calls in call order: synchronous calls on the caller's thread, asynchronous calls on the group's own
// thread, which the first asynchronous call starts.
//
// With a single thread per process, ranks that use two groups in different orders would deadlock, so each group has its
// own thread. Waking a thread takes tens of microseconds. If each rank has a spare core, the thread therefore
// busy-waits for some time before it sleeps (spin_budget.hpp); at most one thread per process does so at a time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "call/call.hpp"
#include "call/prediction_monitor.hpp"
#include "call/recorded_call.hpp"
#include "call/spin_budget.hpp"
#include "process/fork_guard.hpp"

namespace paceline {

class Work {
  public:
    // If `spins` is true, a thread that is waiting for the call may busy-wait briefly.
    Work(Call call, bool spins) : call_(std::move(call)), spins_(spins) {}

    bool done() const { return state_.load(std::memory_order_acquire) == kDone; }
    // Waits for the call. Returns true once it is done, or false after `timeout_ns`.
    bool wait(std::int64_t timeout_ns) const;
    // Valid only after the work is done.
    const Outcome& outcome() const { return outcome_; }

  private:
    friend class CallQueue;

    bool is_awaited() const { return state_.load(std::memory_order_relaxed) == kAwaited; }

    static constexpr std::uint32_t kOpen = 0, kAwaited = 1,
                                   kDone = 2;  // kAwaited: a thread sleeps until the work is done

    void finish(Outcome outcome);

    Call call_;
    bool spins_;
    RecordedCall recorded_;
    Outcome outcome_;
    mutable std::atomic<std::uint32_t> state_{kOpen};
};

class CallQueue {
  public:
    explicit CallQueue(std::unique_ptr<Collectives> group) : group_(std::move(group)) {}
    CallQueue(const CallQueue&) = delete;
    CallQueue& operator=(const CallQueue&) = delete;
    ~CallQueue() { close(); }
    // Cancels all blocked calls on all threads, and returns once no call is running. Idempotent.
    void close();

    // Runs a call synchronously. `interrupted` is called on the caller's thread.
    Outcome run(Call& call, const Interrupted& interrupted);
    std::shared_ptr<Work> submit(Call call);

    // Sets the group's serial number in the recording for all later calls.
    void record_as(std::uint32_t group) { recorded_as_.store(group, std::memory_order_relaxed); }

    // Returns true if this process inherited the queue through a fork; the parent process owns the group.
    bool is_inherited() const { return forks_ != member_fork_count(); }

    // See `Collectives`.
    void abort() { group_->abort(); }
    OutcomeCode failure() { return group_->failure(); }

    // See `PredictionMonitor::take`. Any thread may call this.
    std::optional<PredictionMiss> prediction_miss() { return prediction_monitor_.take(); }

  private:
    Outcome perform(Call& call, RecordedCall& recorded, const Interrupted& interrupted, bool background);
    void work();
    void spin_for_call(std::unique_lock<std::mutex>& lock);
    void arrive(RecordedCall& recorded, const Call& call, bool is_async);

    std::unique_ptr<Collectives> group_;
    const bool spins_when_idle_ = group_->has_spare_core();
    const std::uint32_t forks_ = member_fork_count();  // the value when the queue was created
    std::atomic<std::uint32_t> recorded_as_{0};
    std::atomic<std::uint64_t> arrived_{0};  // the sequence number of the latest call
    std::mutex run_mutex_;
    PredictionMonitor prediction_monitor_;  // guarded by run_mutex_, except for `take`
    std::mutex queue_mutex_;
    std::condition_variable queued_;
    std::deque<std::shared_ptr<Work>> queue_;
    std::atomic<std::uint64_t> pending_{0};
    std::atomic<std::uint32_t> queue_version_{0};  // incremented without the lock after a call is queued and on close
    SpinBudget spin_budget_;                       // used only by `thread_`
    std::atomic<bool> canceled_{false};
    bool closing_ = false;
    std::mutex join_mutex_;
    std::thread thread_;
};

}  // namespace paceline
