#include "call/wait_registry.hpp"

#include <algorithm>
#include <utility>

#include "call/wait_chain.hpp"

namespace paceline {
namespace {

constexpr std::chrono::milliseconds kServes{50};
constexpr std::chrono::milliseconds kServesAtLeast{400};
constexpr int kShare = 50;  // a waiting thread spends about 1/kShare of its time on queries

}  // namespace

void Waits::Entry::say(Waits& waits, Wait wait) {
    const std::lock_guard lock(waits.mutex_);
    if (waits_ == nullptr) {
        waits_ = &waits;
        place_ = waits.waiting_.insert(waits.waiting_.end(), std::move(wait));
    } else {
        *place_ = std::move(wait);
    }
}

void Waits::Entry::end() {
    const std::lock_guard lock(waits_->mutex_);
    waits_->waiting_.erase(place_);
}

void Waits::add(Link& link) {
    const std::lock_guard lock(linking_);
    links_.push_back(&link);
}

void Waits::remove(Link& link) {
    const std::lock_guard lock(linking_);
    std::erase(links_, &link);
}

void Waits::serve() {
    const auto now = Clock::now();
    if (now.time_since_epoch().count() < serves_again_.load(std::memory_order_relaxed)) return;
    const std::unique_lock lock(linking_, std::try_to_lock);
    if (!lock.owns_lock()) return;
    for (Link* const link : links_) link->serve();
    const auto done = Clock::now();
    const auto pause = std::clamp<Clock::duration>(kShare * (done - now), kServes, kServesAtLeast);
    serves_again_.store((done + pause).time_since_epoch().count(), std::memory_order_relaxed);
}

bool Waits::ask(int name, const CallId& in) {
    const std::lock_guard lock(linking_);
    return std::any_of(links_.begin(), links_.end(), [&](Link* link) { return link->ask(name, in); });
}

Answer Waits::about(const CallId& in) const {
    const std::lock_guard lock(mutex_);
    return about_locked(in);
}

// If a thread is waiting in the group of the queried call, only that call or an earlier one can hold up this rank.
// Otherwise, any call in which the program is waiting can hold it up.
Answer Waits::about_locked(const CallId& in) const {
    Answer answer;
    const auto add = [&answer](const Wait& wait) {
        answer.kind = Answer::Kind::waits;
        for (const int name : wait.names) answer.awaited.push_back({name, 0, wait.in});
    };
    const auto in_group = [&in](const Wait& wait) {
        return in.sequence != 0 && wait.in.sequence != 0 && wait.in.group == in.group;
    };
    for (const Wait& wait : waiting_) {
        if (!in_group(wait)) continue;
        if (wait.in.sequence <= in.sequence)
            add(wait);
        else if (answer.kind == Answer::Kind::elsewhere)
            answer.kind = Answer::Kind::past;
    }
    if (answer.kind != Answer::Kind::elsewhere) return answer;
    for (const Wait& wait : waiting_)
        if (wait.by_program) add(wait);
    return answer;
}

void Waits::heard(int name, const CallId& in, Answer answer) {
    const std::lock_guard lock(mutex_);
    for (WaitChainSearch* const each : searches_) each->hear(name, in, answer);
}

}  // namespace paceline
