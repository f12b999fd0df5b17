// Searches for the responsible ranks when a call or message times out (call/wait_chain.hpp), and exchanges queries and
// answers within a group.
#include <algorithm>

#include "executor/executor.hpp"

namespace paceline::executor {
namespace {

using Clock = std::chrono::steady_clock;

// A rank records its call only after one iteration of the wait loop, so a query is answered with `not_waiting` only
// after this delay.
constexpr auto kNotWaitingDelay = std::chrono::milliseconds(100);
constexpr std::size_t kMaxQueries = 64;  // per peer

}  // namespace

void Messenger::add_query(int peer, const CallId& call) {
    std::vector<Query>& queries = state(peer).queries;
    const auto same = [&call](const Query& query) { return query.call == call; };
    if (std::any_of(queries.begin(), queries.end(), same)) return;
    if (queries.size() == kMaxQueries) queries.erase(queries.begin());
    queries.push_back({call, Clock::now()});
}

void Messenger::answer_locked() {
    if (failure_) return;
    for (int peer = 0; peer < lanes_.size(); ++peer) {
        const auto answers = [&](const Query& query) {
            const Answer answer = lanes_.wait_registry().answer_for(query.call);
            if (answer.kind == Answer::Kind::not_waiting && Clock::now() - query.arrived_at < kNotWaitingDelay)
                return false;
            const std::vector<std::uint8_t> bytes = encode(answer);
            push(peer,
                 {.kind = FrameKind::answer,
                  .id = query.call.sequence,
                  .nbytes = bytes.size(),
                  .offset = query.call.group,
                  .tag = static_cast<std::int32_t>(answer.kind)},
                 bytes, nullptr);
            return true;
        };
        if (std::erase_if(state(peer).queries, answers) != 0) flush(peer);
    }
}

void Messenger::answer() {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (lock.owns_lock()) answer_locked();
}

void Messenger::serve() {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return;
    if (!driving_) progress();
    answer_locked();
}

bool Messenger::send_query(int global_rank, const CallId& call) {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock() || failure_) return false;
    for (int peer = 0; peer < lanes_.size(); ++peer) {
        const PeerState& to = state(peer);
        if (lanes_.global_rank(peer) != global_rank || !lanes_.peer(peer).control || to.left || to.lost ||
            to.is_write_closed)
            continue;
        push(peer, {.kind = FrameKind::query, .id = call.sequence, .offset = call.group}, {}, nullptr);
        flush(peer);
        return true;
    }
    return false;
}

// Returns the ranks that the request is waiting for.
std::vector<int> Messenger::peers_of(const Request& request) const {
    if (request.peer_ != kAnySource) return {request.peer_};
    std::vector<int> peers;
    for (int peer = 0; peer < lanes_.size(); ++peer)
        if (peer != lanes_.rank()) peers.push_back(peer);
    return peers;
}

Wait Messenger::wait_for(const Request& request) const {
    return {{lanes_.group(), 0}, true, lanes_.global_ranks_of(peers_of(request))};
}

// Searches for the ranks that block a timed-out request; returns nullopt while they are unknown. Releases the lock
// during the search, because the queries may be sent over other groups.
std::optional<Outcome> Messenger::find_timeout_outcome(std::unique_lock<std::mutex>& lock,
                                                       const std::shared_ptr<Request>& request) {
    const std::vector<int> peers = peers_of(*request);
    if (searched_request_ != request) {
        const std::int64_t waited_ns = std::chrono::nanoseconds(Clock::now() - request->started_).count();
        search_.emplace(lanes_.wait_registry(), CallId{lanes_.group(), 0}, waited_ns, waited_ns);
        searched_request_ = request;
    }
    searching_ = true;
    lock.unlock();
    const auto found = search_->advance(lanes_.global_ranks_of(peers));
    lock.lock();
    searching_ = false;
    if (!found) return std::nullopt;
    Outcome outcome;
    outcome.code = OutcomeCode::timed_out;
    outcome.waited_ns = search_->waited_ns();
    // The queried ranks have not sent or received the message; the progress of all other ranks is unknown.
    const GroupMembers members{[this](int rank) { return lanes_.global_rank(rank); }, [](int) { return true; },
                               lanes_.size()};
    paceline::attribute_timeout(outcome, *found, members, peers, peers);
    outcome.cause = cause_of_timeout(outcome, members);
    outcome.calls = latest_locked();
    const bool any = std::any_of(outcome.calls.begin(), outcome.calls.end(),
                                 [](const CallHeader& call) { return call.sequence != 0; });
    if (!any) outcome.calls.clear();  // empty if this group's collectives do not use the messenger
    return outcome;
}

// Returns a predicate that is true for the ranks known to have begun the current call.
std::function<bool(int)> Executor::has_begun() const {
    return [this, latest = messenger_.latest()](int rank) {
        return rank == lanes_.rank() || latest[static_cast<std::size_t>(rank)].sequence >= header_.sequence;
    };
}

// Returns the awaited ranks that have not begun the call. If there are none and the call needs all ranks, returns all
// ranks that have not begun it. In calls that do not need all ranks, a rank without any sign of the call may have
// finished its part and continued.
std::vector<int> Executor::absent() const {
    const auto has_begun = this->has_begun();
    std::vector<int> ranks = awaited();
    std::erase_if(ranks, has_begun);
    if (!ranks.empty() || !needs_all(header_.operation)) return ranks;
    for (int rank = 0; rank < lanes_.size(); ++rank)
        if (!has_begun(rank)) ranks.push_back(rank);
    return ranks;
}

// Stores the responsible ranks for a timeout in `outcome`; returns false while they are unknown.
bool Executor::attribute_timeout(Outcome& outcome, std::int64_t waited_ns) {
    const std::vector<int> mine = awaited();
    std::vector<int> missing = absent();
    if (!search_)
        search_.emplace(lanes_.wait_registry(), CallId{lanes_.group(), header_.sequence}, timeout_ns_, waited_ns);
    std::vector<int> first = missing;
    first.insert(first.end(), mine.begin(), mine.end());
    const auto found = search_->advance(lanes_.global_ranks_of(first));
    if (!found) return false;
    const GroupMembers members{[this](int rank) { return lanes_.global_rank(rank); }, has_begun(), lanes_.size(),
                               needs_all(header_.operation)};
    paceline::attribute_timeout(outcome, *found, members, std::move(missing), mine);
    outcome.waited_ns = search_->waited_ns();
    outcome.cause = cause_of_timeout(outcome, members);
    return true;
}

}  // namespace paceline::executor
