#include "call/wait_registry.hpp"

#include <algorithm>
#include <utility>

#include "call/wait_chain.hpp"

namespace paceline {
namespace {

constexpr std::chrono::milliseconds kMinServePause{50};
constexpr std::chrono::milliseconds kMaxServePause{400};
constexpr int kServeTimeShare = 50;  // a waiting thread spends about 1/kServeTimeShare of its time on queries

}  // namespace

void WaitRegistry::Entry::update(WaitRegistry& registry, Wait wait) {
    const std::lock_guard lock(registry.mutex_);
    if (registry_ == nullptr) {
        registry_ = &registry;
        position_ = registry.waiting_.insert(registry.waiting_.end(), std::move(wait));
    } else {
        *position_ = std::move(wait);
    }
}

void WaitRegistry::Entry::end() {
    const std::lock_guard lock(registry_->mutex_);
    registry_->waiting_.erase(position_);
}

void WaitRegistry::add(QueryTransport& transport) {
    const std::lock_guard lock(transports_mutex_);
    transports_.push_back(&transport);
}

void WaitRegistry::remove(QueryTransport& transport) {
    const std::lock_guard lock(transports_mutex_);
    std::erase(transports_, &transport);
}

void WaitRegistry::serve() {
    const auto now = Clock::now();
    if (now.time_since_epoch().count() < serves_again_.load(std::memory_order_relaxed)) return;
    const std::unique_lock lock(transports_mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return;
    for (QueryTransport* const transport : transports_) transport->serve();
    const auto done = Clock::now();
    const auto pause = std::clamp<Clock::duration>(kServeTimeShare * (done - now), kMinServePause, kMaxServePause);
    serves_again_.store((done + pause).time_since_epoch().count(), std::memory_order_relaxed);
}

bool WaitRegistry::send_query(int global_rank, const CallId& call) {
    const std::lock_guard lock(transports_mutex_);
    return std::any_of(transports_.begin(), transports_.end(),
                       [&](QueryTransport* transport) { return transport->send_query(global_rank, call); });
}

Answer WaitRegistry::answer_for(const CallId& call) const {
    const std::lock_guard lock(mutex_);
    return answer_for_locked(call);
}

// If a thread is waiting in the queried call's group, only that call or an earlier one can block this rank.
// Otherwise, any call in which the program is waiting can block it.
Answer WaitRegistry::answer_for_locked(const CallId& call) const {
    Answer answer;
    const auto add = [&answer](const Wait& wait) {
        answer.kind = Answer::Kind::waiting;
        for (const int global_rank : wait.global_ranks) answer.awaited.push_back({global_rank, 0, wait.call});
    };
    const auto in_group = [&call](const Wait& wait) {
        return call.sequence != 0 && wait.call.sequence != 0 && wait.call.group == call.group;
    };
    for (const Wait& wait : waiting_) {
        if (!in_group(wait)) continue;
        if (wait.call.sequence <= call.sequence)
            add(wait);
        else if (answer.kind == Answer::Kind::not_waiting)
            answer.kind = Answer::Kind::completed;
    }
    if (answer.kind != Answer::Kind::not_waiting) return answer;
    for (const Wait& wait : waiting_)
        if (wait.by_program) add(wait);
    return answer;
}

void WaitRegistry::receive_answer(int global_rank, const CallId& call, Answer answer) {
    const std::lock_guard lock(mutex_);
    for (WaitChainSearch* const each : searches_) each->receive_answer(global_rank, call, answer);
}

}  // namespace paceline
