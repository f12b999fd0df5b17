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

// Breaks the group if a request has timed out and the ranks to blame have been determined.
void Messenger::expire(std::unique_lock<std::mutex>& hold) {
    lanes_.meter().measure_if_due(Clock::now());
    const std::shared_ptr<Request> late = expired();
    if (inquiring_) return;
    if (!late) {
        search_.reset();
        search_about_.reset();
        return;
    }
    if (std::optional<Outcome> outcome = time_out(hold, late); outcome && !failure_ && !late->done())
        break_group(std::move(*outcome), true);
}

std::shared_ptr<Request> Messenger::expired() {
    const auto now = Clock::now();
    const auto late =
        std::find_if(open_.begin(), open_.end(), [now](const auto& each) { return now > each->deadline_; });
    return late == open_.end() ? nullptr : *late;
}

void Messenger::look_for_silence() {
    std::set<int> awaited;
    for (const std::shared_ptr<Request>& request : open_)
        if (request->peer_ != kAnySource && !state(request->peer_).lost) awaited.insert(request->peer_);
    for (const int peer : awaited) {
        if (!lanes_.peer(peer).control->silent()) continue;
        closed(peer);
        return;
    }
}

// Checks for expired deadlines, silent peers, queries and interrupts. Runs in every iteration of the wait loop, even
// while data is moving.
void Messenger::look_around(std::unique_lock<std::mutex>& hold, const std::shared_ptr<Request>& until, int turn,
                            const Interrupted& interrupted) {
    expire(hold);
    if (turn % kTurnsPerSilenceCheck == 0) look_for_silence();
    answer_locked();
    if (turn * kTurn > Waits::kServesAfter) {
        hold.unlock();
        lanes_.waits().serve();
        hold.lock();
    }
    if (turn % kTurnsPerInterruptCheck != 0 || !interrupted) return;
    hold.unlock();
    const bool stop = interrupted();
    hold.lock();
    if (!stop || !until || until->done()) return;
    Outcome outcome;
    outcome.code = Code::interrupted;
    if (until->peer_ >= 0) outcome.missing = {until->peer_};
    break_group(std::move(outcome), true);
}

// Drives the lanes until the request `until` is done. On the messenger's own thread, where `until` is null, drives them
// until no work remains or another thread is waiting to drive them.
void Messenger::drive(std::unique_lock<std::mutex>& hold, const std::shared_ptr<Request>& until,
                      Clock::time_point deadline, const Interrupted& interrupted) {
    driving_ = true;
    auto idle_since = Clock::now();
    auto looked = idle_since;
    int turn = 0;
    Waits::Entry entry;
    for (;;) {
        const bool moved = progress();
        heed_abort();
        if (until ? until->done() : (open_.empty() || urgent_ > 0 || closing_)) break;
        const auto now = Clock::now();
        if (now > deadline) break;
        if (now - looked >= kTurn) {
            looked = now;
            if (until) entry.say(lanes_.waits(), wait_for(*until));
            look_around(hold, until, ++turn, interrupted);
            continue;
        }
        if (moved) {
            idle_since = now;
            continue;
        }
        if (until && now - idle_since < kSpin) {
            hold.unlock();
            sched_yield();
            hold.lock();
            continue;
        }
        bool more = false;
        for (int peer = 0; peer < lanes_.size(); ++peer)
            if (lanes_.peer(peer).control && !state(peer).lost && !state(peer).left)
                more |= lanes_.peer(peer).control->arm();
        if (more) continue;
        hold.unlock();
        waiter_.sleep(kTurn);
        hold.lock();
    }
    driving_ = false;
    changed_.notify_all();
}

bool Messenger::wait(const std::shared_ptr<Request>& request, std::int64_t timeout_ns, const Interrupted& interrupted) {
    if (request->done()) return true;
    auto looked = Clock::now();
    lanes_.meter().measure_if_due(looked);
    const auto most = std::chrono::nanoseconds(Clock::time_point::max() - looked).count();
    const auto deadline = looked + std::chrono::nanoseconds(std::min(timeout_ns, most / 2));
    std::unique_lock hold(mutex_);
    ++urgent_;
    if (driving_) waiter_.wake();
    Waits::Entry entry;
    for (int turn = 0; !request->done() && Clock::now() <= deadline;) {
        if (!driving_) {
            drive(hold, request, deadline, interrupted);
            continue;
        }
        changed_.wait_for(hold, kTurn);
        if (Clock::now() - looked < kTurn) continue;
        looked = Clock::now();
        entry.say(lanes_.waits(), wait_for(*request));
        look_around(hold, request, ++turn, interrupted);
    }
    --urgent_;
    changed_.notify_all();
    return request->done();
}

void Messenger::run_in_background() {
    const std::lock_guard hold(mutex_);
    if (!thread_.joinable()) thread_ = std::thread([this] { background(); });
    changed_.notify_all();
}

void Messenger::background() {
    pthread_setname_np(pthread_self(), "paceline-messages");
    std::unique_lock hold(mutex_);
    for (;;) {
        changed_.wait(hold, [this] { return closing_ || (!open_.empty() && !driving_ && urgent_ == 0); });
        if (closing_) return;
        drive(hold, nullptr, Clock::time_point::max(), nullptr);
    }
}

void Messenger::poll() {
    std::unique_lock hold(mutex_, std::try_to_lock);
    if (hold.owns_lock() && !driving_) progress();
}

}  // namespace paceline::executor
