// Drives the messenger's lanes, on threads that wait for requests or on the messenger's own thread.
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <set>

#include "call/poll_interval.hpp"
#include "executor/messenger.hpp"

namespace paceline::executor {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

bool Messenger::progress() {
    bool moved = false;
    for (int peer = 0; peer < lanes_.size(); ++peer) {
        PeerState& each = state(peer);
        if (!lanes_.peer(peer).control || each.lost || each.left) continue;
        if (!each.outgoing.empty()) moved |= flush(peer);
        moved |= receive_from(peer);
    }
    return moved;
}

// Breaks the group if a request has timed out and the responsible ranks have been determined.
void Messenger::expire(std::unique_lock<std::mutex>& lock) {
    lanes_.meter().measure_if_due(Clock::now());
    const std::shared_ptr<Request> late = expired();
    if (searching_) return;
    if (!late) {
        search_.reset();
        searched_request_.reset();
        return;
    }
    if (std::optional<Outcome> outcome = find_timeout_outcome(lock, late); outcome && !failure_ && !late->done())
        break_group(std::move(*outcome), true);
}

std::shared_ptr<Request> Messenger::expired() {
    const auto now = Clock::now();
    const auto late =
        std::find_if(open_.begin(), open_.end(), [now](const auto& each) { return now > each->deadline_; });
    return late == open_.end() ? nullptr : *late;
}

void Messenger::check_silent_peers() {
    std::set<int> awaited;
    for (const std::shared_ptr<Request>& request : open_)
        if (request->peer_ != kAnySource && !state(request->peer_).lost) awaited.insert(request->peer_);
    for (const int peer : awaited) {
        if (!lanes_.peer(peer).control->silent()) continue;
        handle_close(peer);
        return;
    }
}

// Checks for expired deadlines, silent peers, queries and interrupts. Runs in every iteration of the wait loop, even
// while data is moving.
void Messenger::check_events(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Request>& until, int iteration,
                             const Interrupted& interrupted) {
    expire(lock);
    if (iteration % kPollsPerSilenceCheck == 0) check_silent_peers();
    answer_locked();
    if (iteration * kPollInterval > WaitRegistry::kServeDelay) {
        lock.unlock();
        lanes_.wait_registry().serve();
        lock.lock();
    }
    if (iteration % kPollsPerInterruptCheck != 0 || !interrupted) return;
    lock.unlock();
    const bool stop = interrupted();
    lock.lock();
    if (!stop || !until || until->done()) return;
    Outcome outcome;
    outcome.code = OutcomeCode::interrupted;
    if (until->peer_ >= 0) outcome.missing = {until->peer_};
    break_group(std::move(outcome), true);
}

// Drives the lanes until the request `until` is done. On the messenger's own thread, where `until` is null, drives them
// until no work remains or another thread is waiting to drive them.
void Messenger::drive(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Request>& until,
                      Clock::time_point deadline, const Interrupted& interrupted) {
    driving_ = true;
    auto idle_since = Clock::now();
    auto last_check = idle_since;
    int iteration = 0;
    WaitRegistry::Entry entry;
    for (;;) {
        const bool moved = progress();
        handle_abort();
        if (until ? until->done() : (open_.empty() || waiting_threads_ > 0 || closing_)) break;
        const auto now = Clock::now();
        if (now > deadline) break;
        if (now - last_check >= kPollInterval) {
            last_check = now;
            if (until) entry.update(lanes_.wait_registry(), wait_for(*until));
            check_events(lock, until, ++iteration, interrupted);
            continue;
        }
        if (moved) {
            idle_since = now;
            continue;
        }
        if (until && now - idle_since < kMaxSpin) {
            lock.unlock();
            sched_yield();
            lock.lock();
            continue;
        }
        bool more = false;
        for (int peer = 0; peer < lanes_.size(); ++peer)
            if (lanes_.peer(peer).control && !state(peer).lost && !state(peer).left)
                more |= lanes_.peer(peer).control->arm();
        if (more) continue;
        lock.unlock();
        waiter_.sleep(kPollInterval);
        lock.lock();
    }
    driving_ = false;
    changed_.notify_all();
}

bool Messenger::wait(const std::shared_ptr<Request>& request, std::int64_t timeout_ns, const Interrupted& interrupted) {
    if (request->done()) return true;
    auto last_check = Clock::now();
    lanes_.meter().measure_if_due(last_check);
    const auto most = std::chrono::nanoseconds(Clock::time_point::max() - last_check).count();
    const auto deadline = last_check + std::chrono::nanoseconds(std::min(timeout_ns, most / 2));
    std::unique_lock lock(mutex_);
    ++waiting_threads_;
    if (driving_) waiter_.wake();
    WaitRegistry::Entry entry;
    for (int iteration = 0; !request->done() && Clock::now() <= deadline;) {
        if (!driving_) {
            drive(lock, request, deadline, interrupted);
            continue;
        }
        changed_.wait_for(lock, kPollInterval);
        if (Clock::now() - last_check < kPollInterval) continue;
        last_check = Clock::now();
        entry.update(lanes_.wait_registry(), wait_for(*request));
        check_events(lock, request, ++iteration, interrupted);
    }
    --waiting_threads_;
    changed_.notify_all();
    return request->done();
}

void Messenger::run_in_background() {
    const std::lock_guard lock(mutex_);
    if (!thread_.joinable()) thread_ = std::thread([this] { background(); });
    changed_.notify_all();
}

void Messenger::background() {
    pthread_setname_np(pthread_self(), "paceline-messages");
    std::unique_lock lock(mutex_);
    for (;;) {
        changed_.wait(lock, [this] { return closing_ || (!open_.empty() && !driving_ && waiting_threads_ == 0); });
        if (closing_) return;
        drive(lock, nullptr, Clock::time_point::max(), nullptr);
    }
}

void Messenger::poll() {
    std::unique_lock lock(mutex_, std::try_to_lock);
    if (lock.owns_lock() && !driving_) progress();
}

}  // namespace paceline::executor
