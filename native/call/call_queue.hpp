// Runs a group's calls in the order in which they were made: synchronous calls on the caller's thread, asynchronous
// calls on the group's own thread, which the first asynchronous call starts.
//
// Each group has its own thread. With one thread per process, two groups that two ranks use in different orders would
// deadlock. If each rank has a core for it, the thread busy-waits for a while for the next call (patience.hpp), since
// waking up takes tens of microseconds. At most one thread of a process does so at a time.
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
    // `spins`: whether a thread that waits for the call may briefly busy-wait.
    Work(Call call, bool spins) : call_(std::move(call)), spins_(spins) {}

    bool done() const { return state_.load(std::memory_order_acquire) == kDone; }
    // Returns true once the work is done, or false after `timeout_ns`.
    bool wait(std::int64_t timeout_ns) const;
    // Must only be called once the work is done.
    const Outcome& outcome() const { return outcome_; }

  private:
    friend class CallQueue;

    bool is_awaited() const { return state_.load(std::memory_order_relaxed) == kAwaited; }

    static constexpr std::uint32_t kOpen = 0, kAwaited = 1,
                                   kDone = 2;  // awaited: a thread sleeps until the work is done

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
    // Ends every waiting call, including those on other threads, and returns once no call is running. Idempotent.
    void close();

    // `interrupted` is called on the caller's thread.
    Outcome run(Call& call, const Interrupted& interrupted);
    std::shared_ptr<Work> submit(Call call);

    // Records later calls under the recorder's serial number of the group.
    void record_as(std::uint32_t group) { recorded_as_.store(group, std::memory_order_relaxed); }

    // Whether this process inherited the queue by a fork from a parent, which owns the group.
    bool is_inherited() const { return forks_ != forks_from_members(); }

    // As for `Collectives`.
    void abort() { group_->abort(); }
    Code failure() { return group_->failure(); }

    // Returns the calls that were far from their prediction, once; any thread may call this.
    std::optional<Surprise> surprise() { return foresight_.take(); }

  private:
    Outcome perform(Call& call, RecordedCall& recorded, const Interrupted& interrupted, bool background);
    void work();
    void linger(std::unique_lock<std::mutex>& hold);
    void arrive(RecordedCall& recorded, const Call& call, bool is_async);

    std::unique_ptr<Collectives> group_;
    const bool lingers_ = group_->has_spare_core();
    const std::uint32_t forks_ = forks_from_members();  // when the queue was created
    std::atomic<std::uint32_t> recorded_as_{0};
    std::atomic<std::uint64_t> arrived_{0};  // the number of calls so far, which is the sequence number of the latest
    std::mutex running_;
    Foresight foresight_;  // guarded by running_, except for `take`
    std::mutex queueing_;
    std::condition_variable queued_;
    std::deque<std::shared_ptr<Work>> queue_;
    std::atomic<std::uint64_t> pending_{0};
    std::atomic<std::uint32_t> news_{0};  // incremented, without the lock, when a call has been queued and at the end
    Patience patience_;                   // of the thread
    std::atomic<bool> cancelled_{false};
    bool closing_ = false;
    std::mutex joining_;
    std::thread thread_;
};

}  // namespace paceline
