// Runs a group's calls in the order in which they were made: synchronous ones on the caller's thread, asynchronous ones
// on a thread of the group's own, which is started by the first of them.
//
// One thread a group, not a process: with one, two groups used in different orders by two ranks would wait for each
// other.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "call/call.hpp"

namespace paceline {

class Work {
  public:
    explicit Work(Call call) : call_(std::move(call)) {}

    bool done() const { return done_.load(std::memory_order_acquire) != 0; }
    // True when done; false after `timeout_ns`.
    bool wait(std::int64_t timeout_ns) const;
    // Only when done.
    const Outcome& outcome() const { return outcome_; }

  private:
    friend class CallQueue;

    void finish(Outcome outcome);

    Call call_;
    Outcome outcome_;
    std::atomic<std::uint32_t> done_{0};
};

class CallQueue {
  public:
    explicit CallQueue(std::unique_ptr<Collectives> group) : group_(std::move(group)) {}
    CallQueue(const CallQueue&) = delete;
    CallQueue& operator=(const CallQueue&) = delete;
    ~CallQueue() { close(); }
    // Ends every call that waits, other threads' as well, and returns when none runs. Idempotent.
    void close();

    // `interrupted` is asked on the caller's thread.
    Outcome run(Call call, const Interrupted& interrupted);
    std::shared_ptr<Work> submit(Call call);

  private:
    void work();

    std::unique_ptr<Collectives> group_;
    std::mutex running_;
    std::mutex queueing_;
    std::condition_variable queued_;
    std::deque<std::shared_ptr<Work>> queue_;
    std::atomic<std::uint64_t> pending_{0};
    std::atomic<bool> cancelled_{false};
    bool closing_ = false;
    std::mutex joining_;
    std::thread thread_;
};

}  // namespace paceline
