// Determines which ranks block a call that has timed out. The search queries each awaited rank. The answer lists the
// ranks that the queried rank is waiting for, and the search queries these ranks next, across all groups. A rank that
// is waiting is not responsible. A rank is responsible if it does not answer or reports that its program is not
// waiting.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "call/call.hpp"
#include "call/wait_registry.hpp"

namespace paceline {

// The result of a search. All lists contain global ranks in ascending order. The call is merely slow if `blocking` and
// `waiting` are both empty; the ranks are deadlocked if only `blocking` is empty.
struct WaitChainResult {
    std::vector<int> blocking;
    std::vector<int> waiting;  // ranks that wait, directly or indirectly, for a rank in `blocking`
    std::vector<int> in_call;  // ranks that another rank is waiting for in this call
};

class WaitChainSearch {
  public:
    // Starts a search that begins at `call`, which has been waiting for `waited_ns` and times out after `timeout_ns`.
    WaitChainSearch(WaitRegistry& registry, CallId call, std::int64_t timeout_ns, std::int64_t waited_ns);
    WaitChainSearch(const WaitChainSearch&) = delete;
    WaitChainSearch& operator=(const WaitChainSearch&) = delete;
    ~WaitChainSearch();

    // Continues the search; returns nullopt while answers may still arrive. `awaited` contains the global ranks that
    // the call is currently waiting for. Not thread-safe.
    std::optional<WaitChainResult> advance(const std::vector<int>& awaited);

    std::int64_t waited_ns() const { return waited_ns_; }

  private:
    friend class WaitRegistry;
    using Clock = std::chrono::steady_clock;
    using Key = std::pair<int, CallId>;

    struct Query {
        Clock::time_point since;
        bool sent = false;
        std::optional<Answer> answer;
    };

    void receive_answer(int global_rank, const CallId& call, const Answer& answer);
    Answer latest_answer_locked(const Key& key) const;
    std::set<int> blocked_locked(const std::vector<Key>& reached, const std::set<int>& blocking) const;

    WaitRegistry& registry_;
    const CallId call_;
    const std::int64_t waited_ns_;
    const Clock::duration answer_timeout_;
    const Clock::time_point begun_ = Clock::now();
    std::optional<Clock::time_point> decided_;  // when the responsible ranks were first determined
    std::map<Key, Query> queries_;              // guarded by the lock of `registry_`
};

// Describes a group's ranks: their global ranks, and whether each rank has begun the failed call.
struct GroupMembers {
    std::function<int(int)> global_rank;
    std::function<bool(int)> has_begun;
    int size;
    // If false, `has_begun` may also return false for a rank that has already finished its part of the call.
    bool is_certain = true;
};

// Stores in `outcome` the ranks that `found` identifies as responsible. `absent` contains the group ranks that have not
// begun the call, and `awaited` contains those that the call is waiting for.
void attribute_timeout(Outcome& outcome, const WaitChainResult& found, const GroupMembers& members,
                       std::vector<int> absent, const std::vector<int>& awaited);

// Returns the cause that the ranks of a group report when they fail a call after a timeout.
FailureCause cause_of_timeout(const Outcome& outcome, const GroupMembers& members);

// Returns the cause that the rank `mine` reports if it leaves its other groups because of `outcome`, or an unknown
// cause if it need not leave. `global_rank` maps group ranks to global ranks.
FailureCause cause_of_leaving(const Outcome& outcome, int mine, const std::function<int(int)>& global_rank);

}  // namespace paceline
