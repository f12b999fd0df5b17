#include "call/wait_chain.hpp"

#include <algorithm>
#include <set>

namespace paceline {
namespace {

// The minimum and maximum times to wait for an answer. A waiting rank reads queries several times per second.
constexpr std::chrono::nanoseconds kMinAnswerTimeout = std::chrono::milliseconds(300);
constexpr std::chrono::nanoseconds kMaxAnswerTimeout = std::chrono::seconds(1);
constexpr int kMaxTimeouts = 3;  // the search ends after this multiple of the answer timeout, even if it is incomplete
constexpr std::size_t kMax = 8192;  // maximum number of queries, a bound for malformed answers
// The time for which a rank continues to answer queries after its search is complete. Ranks that wait for each other
// often time out together, and the first one to finish must not appear to block the others.
constexpr std::chrono::milliseconds kAnswersAfterSearch{300};

}  // namespace

WaitChainSearch::WaitChainSearch(WaitRegistry& registry, CallId call, std::int64_t timeout_ns, std::int64_t waited_ns)
    : registry_(registry),
      call_(call),
      waited_ns_(waited_ns),
      answer_timeout_(std::clamp(std::chrono::nanoseconds(timeout_ns), kMinAnswerTimeout, kMaxAnswerTimeout)) {
    const std::lock_guard lock(registry_.mutex_);
    registry_.searches_.push_back(this);
}

WaitChainSearch::~WaitChainSearch() {
    const std::lock_guard lock(registry_.mutex_);
    std::erase(registry_.searches_, this);
}

void WaitChainSearch::receive_answer(int global_rank, const CallId& call, const Answer& answer) {
    if (const auto found = queries_.find({global_rank, call}); found != queries_.end()) found->second.answer = answer;
}

Answer WaitChainSearch::latest_answer_locked(const Key& key) const {
    if (key.first == registry_.global_rank()) return registry_.answer_for_locked(key.second);
    const auto found = queries_.find(key);
    return found != queries_.end() ? found->second.answer.value_or(Answer{}) : Answer{};
}

// Returns the ranks in `reached` that wait, directly or indirectly, for a rank in `blocking`. The remaining ranks wait
// for each other.
std::set<int> WaitChainSearch::blocked_locked(const std::vector<Key>& reached, const std::set<int>& blocking) const {
    std::set<Key> held;
    for (const Key& key : reached)
        if (blocking.contains(key.first)) held.insert(key);
    for (bool grows = true; grows;) {
        grows = false;
        for (auto key = reached.rbegin(); key != reached.rend(); ++key) {
            if (held.contains(*key)) continue;
            const std::vector<AwaitedRank> awaited = latest_answer_locked(*key).awaited;
            const auto is_held = [&held](const AwaitedRank& each) {
                return held.contains({each.global_rank, each.call});
            };
            if (!std::any_of(awaited.begin(), awaited.end(), is_held)) continue;
            held.insert(*key);
            grows = true;
        }
    }
    std::set<int> global_ranks;
    for (const Key& key : held) global_ranks.insert(key.first);
    return global_ranks;
}

std::optional<WaitChainResult> WaitChainSearch::advance(const std::vector<int>& awaited) {
    const auto now = Clock::now();
    const bool ends = now - begun_ > kMaxTimeouts * answer_timeout_;
    std::vector<Key> reached;
    std::vector<Key> unsent;
    std::set<int> blocking;
    std::set<int> in_call;
    std::set<int> waiting;
    bool open = false;
    bool under_way = false;  // a rank has finished its part, but its data has not arrived yet
    {
        const std::lock_guard lock(registry_.mutex_);
        std::set<Key> seen;
        const auto reach = [&](int global_rank, const CallId& call) {
            if (seen.size() < kMax && seen.insert({global_rank, call}).second) reached.emplace_back(global_rank, call);
        };
        const auto follow = [&](const Answer& answer) {
            for (const AwaitedRank& each : answer.awaited) reach(each.global_rank, each.call);
        };
        for (const int global_rank : awaited) reach(global_rank, call_);
        for (std::size_t at = 0; at < reached.size(); ++at) {
            const Key key = reached[at];
            if (key.second == call_) in_call.insert(key.first);
            if (key.first == registry_.global_rank()) {
                follow(registry_.answer_for_locked(key.second));
                continue;
            }
            Query& query = queries_.try_emplace(key, Query{now, false, std::nullopt}).first->second;
            if (query.answer) {
                if (query.answer->kind == Answer::Kind::not_waiting) blocking.insert(key.first);
                if (query.answer->kind == Answer::Kind::waiting) waiting.insert(key.first);
                under_way = under_way || query.answer->kind == Answer::Kind::completed;
                follow(*query.answer);
                continue;
            }
            if (!query.sent) unsent.push_back(key);
            if (!ends && now - query.since < answer_timeout_)
                open = true;
            else
                blocking.insert(key.first);
        }
        if (!open && !blocking.empty()) {
            const std::set<int> held_up = blocked_locked(reached, blocking);
            std::erase_if(waiting, [&held_up](int global_rank) { return !held_up.contains(global_rank); });
        }
    }
    for (const Key& key : unsent) {
        if (!registry_.send_query(key.first, key.second)) continue;
        const std::lock_guard lock(registry_.mutex_);
        queries_.at(key).sent = true;
    }
    if (open) return std::nullopt;
    if (!decided_) decided_ = now;
    if (!waiting.empty() && !ends && now - *decided_ < kAnswersAfterSearch) return std::nullopt;
    WaitChainResult found;
    if (blocking.empty() && under_way) return found;
    found.blocking.assign(blocking.begin(), blocking.end());
    found.in_call.assign(in_call.begin(), in_call.end());
    std::set_difference(waiting.begin(), waiting.end(), blocking.begin(), blocking.end(),
                        std::back_inserter(found.waiting));
    return found;
}

void attribute_timeout(Outcome& outcome, const WaitChainResult& found, const GroupMembers& members,
                       std::vector<int> absent, const std::vector<int>& awaited) {
    const auto is_among = [](const std::vector<int>& all, int one) {
        return std::find(all.begin(), all.end(), one) != all.end();
    };
    std::vector<int> here;  // ranks in this group that block the call
    for (int rank = 0; rank < members.size; ++rank) {
        const int global_rank = members.global_rank(rank);
        const bool holds_up = is_among(found.blocking, global_rank);
        if (!holds_up && !is_among(found.waiting, global_rank)) continue;
        if (!members.has_begun(rank) && !is_among(absent, rank)) {
            if (!is_among(found.in_call, global_rank) && !(members.is_certain && holds_up)) continue;
            absent.push_back(rank);
        }
        if (holds_up) here.push_back(rank);
    }
    std::sort(absent.begin(), absent.end());
    outcome.has_begun = absent.empty();
    outcome.missing = !absent.empty() ? absent : !here.empty() ? here : awaited;
    outcome.waiting.clear();
    outcome.blocked_by = found.blocking;
    for (const int rank : outcome.missing) {
        std::erase(outcome.blocked_by, members.global_rank(rank));
        if (!outcome.has_begun && is_among(found.waiting, members.global_rank(rank))) outcome.waiting.push_back(rank);
    }
}

FailureCause cause_of_timeout(const Outcome& outcome, const GroupMembers& members) {
    FailureCause cause;
    cause.hung = true;
    if (!outcome.blocked_by.empty()) cause.rank = outcome.blocked_by.front();
    for (const int rank : outcome.missing) {
        if (std::find(outcome.waiting.begin(), outcome.waiting.end(), rank) != outcome.waiting.end()) continue;
        cause.rank = members.global_rank(rank);
        break;
    }
    return cause;
}

FailureCause cause_of_leaving(const Outcome& outcome, int mine, const std::function<int(int)>& global_rank) {
    if (outcome.code == OutcomeCode::timed_out) return outcome.cause.rank != mine ? outcome.cause : FailureCause{};
    if (outcome.code != OutcomeCode::peer_lost || outcome.gone.empty()) return {};
    return outcome.cause.known() ? outcome.cause
                                 : FailureCause{global_rank(outcome.gone.front()), outcome.gone == outcome.left};
}

}  // namespace paceline
