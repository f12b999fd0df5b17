#include "call/wait_chain.hpp"

#include <algorithm>
#include <set>

namespace paceline {
namespace {

// The least and greatest times to wait for an answer. A waiting rank reads queries several times per second.
constexpr std::chrono::nanoseconds kMinAnswerTimeout = std::chrono::milliseconds(300);
constexpr std::chrono::nanoseconds kMaxAnswerTimeout = std::chrono::seconds(1);
constexpr int kMaxTimeouts = 3;  // the search ends after this multiple of the answer timeout, even if it is incomplete
constexpr std::size_t kMax = 8192;  // maximum number of queries, a bound for malformed answers
// The time for which a rank continues to answer queries after its search is complete. Ranks that wait for each other
// often time out together, and the first one to finish must not appear to hold up the others.
constexpr std::chrono::milliseconds kStays{300};

}  // namespace

WaitChainSearch::WaitChainSearch(Waits& waits, CallId in, std::int64_t timeout_ns, std::int64_t waited_ns)
    : waits_(waits),
      in_(in),
      waited_ns_(waited_ns),
      answer_timeout_(std::clamp(std::chrono::nanoseconds(timeout_ns), kMinAnswerTimeout, kMaxAnswerTimeout)) {
    const std::lock_guard lock(waits_.mutex_);
    waits_.searches_.push_back(this);
}

WaitChainSearch::~WaitChainSearch() {
    const std::lock_guard lock(waits_.mutex_);
    std::erase(waits_.searches_, this);
}

void WaitChainSearch::hear(int name, const CallId& in, const Answer& answer) {
    if (const auto found = asked_.find({name, in}); found != asked_.end()) found->second.answer = answer;
}

Answer WaitChainSearch::known_locked(const Key& key) const {
    if (key.first == waits_.name()) return waits_.about_locked(key.second);
    const auto found = asked_.find(key);
    return found != asked_.end() ? found->second.answer.value_or(Answer{}) : Answer{};
}

// Returns the ranks in `reached` that wait, directly or indirectly, for a rank in `holding_up`. The remaining ranks
// wait for each other.
std::set<int> WaitChainSearch::held_up_locked(const std::vector<Key>& reached, const std::set<int>& holding_up) const {
    std::set<Key> held;
    for (const Key& key : reached)
        if (holding_up.contains(key.first)) held.insert(key);
    for (bool grows = true; grows;) {
        grows = false;
        for (auto key = reached.rbegin(); key != reached.rend(); ++key) {
            if (held.contains(*key)) continue;
            const std::vector<Awaited> awaited = known_locked(*key).awaited;
            const auto is_held = [&held](const Awaited& each) { return held.contains({each.name, each.in}); };
            if (!std::any_of(awaited.begin(), awaited.end(), is_held)) continue;
            held.insert(*key);
            grows = true;
        }
    }
    std::set<int> names;
    for (const Key& key : held) names.insert(key.first);
    return names;
}

std::optional<Finding> WaitChainSearch::look(const std::vector<int>& awaited) {
    const auto now = Clock::now();
    const bool ends = now - begun_ > kMaxTimeouts * answer_timeout_;
    std::vector<Key> reached;
    std::vector<Key> to_ask;
    std::set<int> holding_up;
    std::set<int> in_call;
    std::set<int> waiting;
    bool open = false;
    bool under_way = false;  // a rank has finished its part, but its data has not arrived yet
    {
        const std::lock_guard lock(waits_.mutex_);
        std::set<Key> seen;
        const auto reach = [&](int name, const CallId& in) {
            if (seen.size() < kMax && seen.insert({name, in}).second) reached.emplace_back(name, in);
        };
        const auto follow = [&](const Answer& answer) {
            for (const Awaited& each : answer.awaited) reach(each.name, each.in);
        };
        for (const int name : awaited) reach(name, in_);
        for (std::size_t at = 0; at < reached.size(); ++at) {
            const Key key = reached[at];
            if (key.second == in_) in_call.insert(key.first);
            if (key.first == waits_.name()) {
                follow(waits_.about_locked(key.second));
                continue;
            }
            Asked& asked = asked_.try_emplace(key, Asked{now, false, std::nullopt}).first->second;
            if (asked.answer) {
                if (asked.answer->kind == Answer::Kind::elsewhere) holding_up.insert(key.first);
                if (asked.answer->kind == Answer::Kind::waits) waiting.insert(key.first);
                under_way = under_way || asked.answer->kind == Answer::Kind::past;
                follow(*asked.answer);
                continue;
            }
            if (!asked.sent) to_ask.push_back(key);
            if (!ends && now - asked.since < answer_timeout_)
                open = true;
            else
                holding_up.insert(key.first);
        }
        if (!open && !holding_up.empty()) {
            const std::set<int> held_up = held_up_locked(reached, holding_up);
            std::erase_if(waiting, [&held_up](int name) { return !held_up.contains(name); });
        }
    }
    for (const Key& key : to_ask) {
        if (!waits_.ask(key.first, key.second)) continue;
        const std::lock_guard lock(waits_.mutex_);
        asked_.at(key).sent = true;
    }
    if (open) return std::nullopt;
    if (!decided_) decided_ = now;
    if (!waiting.empty() && !ends && now - *decided_ < kStays) return std::nullopt;
    Finding found;
    if (holding_up.empty() && under_way) return found;
    found.holding_up.assign(holding_up.begin(), holding_up.end());
    found.in_call.assign(in_call.begin(), in_call.end());
    std::set_difference(waiting.begin(), waiting.end(), holding_up.begin(), holding_up.end(),
                        std::back_inserter(found.waiting));
    return found;
}

void blame(Outcome& outcome, const Finding& found, const Members& members, std::vector<int> absent,
           const std::vector<int>& awaited) {
    const auto is_among = [](const std::vector<int>& all, int one) {
        return std::find(all.begin(), all.end(), one) != all.end();
    };
    std::vector<int> here;  // ranks of this group that hold up the call
    for (int rank = 0; rank < members.size; ++rank) {
        const int name = members.name(rank);
        const bool holds_up = is_among(found.holding_up, name);
        if (!holds_up && !is_among(found.waiting, name)) continue;
        if (!members.has_come(rank) && !is_among(absent, rank)) {
            if (!is_among(found.in_call, name) && !(members.is_certain && holds_up)) continue;
            absent.push_back(rank);
        }
        if (holds_up) here.push_back(rank);
    }
    std::sort(absent.begin(), absent.end());
    outcome.came = absent.empty();
    outcome.missing = !absent.empty() ? absent : !here.empty() ? here : awaited;
    outcome.waiting.clear();
    outcome.held_by = found.holding_up;
    for (const int rank : outcome.missing) {
        std::erase(outcome.held_by, members.name(rank));
        if (!outcome.came && is_among(found.waiting, members.name(rank))) outcome.waiting.push_back(rank);
    }
}

Cause cause_of_time_out(const Outcome& outcome, const Members& members) {
    Cause cause;
    cause.hung = true;
    if (!outcome.held_by.empty()) cause.rank = outcome.held_by.front();
    for (const int rank : outcome.missing) {
        if (std::find(outcome.waiting.begin(), outcome.waiting.end(), rank) != outcome.waiting.end()) continue;
        cause.rank = members.name(rank);
        break;
    }
    return cause;
}

Cause cause_of_leaving(const Outcome& outcome, int mine, const std::function<int(int)>& name) {
    if (outcome.code == Code::timed_out) return outcome.cause.rank != mine ? outcome.cause : Cause{};
    if (outcome.code != Code::peer_lost || outcome.gone.empty()) return {};
    return outcome.cause.known() ? outcome.cause : Cause{name(outcome.gone.front()), outcome.gone == outcome.left};
}

}  // namespace paceline
