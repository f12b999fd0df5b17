// Runs a group's calls in the order in which they were made: synchronous ones on the caller's thread, asynchronous ones
// on a thread of the group's own, which the first of them starts.
//
// Each group has its own thread. With one thread per process, two groups that two ranks use in different orders would
// deadlock. Where each rank has a core for it, the thread waits a while for the next call with the core busy
// (patience.hpp), since it takes tens of microseconds to wake up; of all such threads of a process, one at a time does.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "call/call.hpp"
#include "call/foresight.hpp"
#include "call/patience.hpp"
#include "call/recorded_call.hpp"
#include "process/fork_guard.hpp"

namespace paceline {

class Work {
  public:
    // `spins`: whether a thread that waits for the call may keep its core busy for a moment.
    Work(Call call, bool spins) : call_(std::move(call)), spins_(spins) {}

    bool done() const { return state_.load(std::memory_order_acquire) == kDone; }
    // Returns true when the work is done, false after `timeout_ns`.
    bool wait(std::int64_t timeout_ns) const;
    // May be called only when the work is done.
    const Outcome& outcome() const { return outcome_; }

  private:
    friend class CallQueue;

    bool is_awaited() const { return state_.load(std::memory_order_relaxed) == kAwaited; }

    static constexpr std::uint32_t kOpen = 0, kAwaited = 1, kDone = 2;  // awaited: a thread sleeps until it is done

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
    // Ends every waiting call, on other threads too, and returns when no call runs any more. Idempotent.
    void close();

    // `interrupted` is called on the caller's thread.
    Outcome run(Call& call, const Interrupted& interrupted);
    std::shared_ptr<Work> submit(Call call);

    // Records the calls from now on as those of the group that the recorder knows by this serial.
    void record_as(std::uint32_t group) { recorded_as_.store(group, std::memory_order_relaxed); }

    // Whether this process has the queue from a parent, whose group it is, by a fork.
    bool is_inherited() const { return forks_ != forks_from_members(); }

    // As for `Collectives`.
    void abort() { group_->abort(); }
    Code failure() { return group_->failure(); }

    // What was far from its prediction, once; for any thread.
    std::optional<Surprise> surprise() { return foresight_.take(); }

  private:
    Outcome perform(Call& call, RecordedCall& recorded, const Interrupted& interrupted, bool background);
    void work();
    void linger(std::unique_lock<std::mutex>& hold);
    void arrive(RecordedCall& recorded, const Call& call, bool is_async);

    std::unique_ptr<Collectives> group_;
    const bool lingers_ = group_->has_spare_core();
    const std::uint32_t forks_ = forks_from_members();  // when the queue was made
    std::atomic<std::uint32_t> recorded_as_{0};
    std::atomic<std::uint64_t> arrived_{0};  // calls so far, which numbers them as the group does
    std::mutex running_;
    Foresight foresight_;  // guarded by running_ but for `take`
    std::mutex queueing_;
    std::condition_variable queued_;
    std::deque<std::shared_ptr<Work>> queue_;
    std::atomic<std::uint64_t> pending_{0};
    std::atomic<std::uint32_t> news_{0};  // raised when a call has been queued, and at the end; without the lock
    Patience patience_;                   // of the thread
    std::atomic<bool> cancelled_{false};
    bool closing_ = false;
    std::mutex joining_;
    std::thread thread_;
};

}  // namespace paceline
