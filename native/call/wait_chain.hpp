// Determines which ranks hold up a call that has timed out: it queries the ranks for which the call waits about the
// ranks for which they wait in turn, and follows the answers across all groups. A waiting rank is not to blame; a rank
// is to blame if it does not answer, or if it reports that its program does not wait.
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
#include "call/waits.hpp"

namespace paceline {

// Ranks by name, in ascending order. If both of the first two lists are empty, the call is merely slow; if only
// `waiting` has ranks, they wait for each other.
struct Finding {
    std::vector<int> holding_up;
    std::vector<int> waiting;  // the ranks that merely wait, directly or through others, for a rank that holds them up
    std::vector<int> in_call;  // the ranks of both lists for which the call itself waits, here or on another rank
};

class WaitChainSearch {
  public:
    // A search about the call `in`, which has waited for `waited_ns` of its `timeout_ns`.
    WaitChainSearch(Waits& waits, Occasion in, std::int64_t timeout_ns, std::int64_t waited_ns);
    WaitChainSearch(const WaitChainSearch&) = delete;
    WaitChainSearch& operator=(const WaitChainSearch&) = delete;
    ~WaitChainSearch();

    // Continues the search; returns nullopt while answers may still arrive. `awaited` are the names of the ranks for
    // which the call currently waits. One thread at a time may call this.
    std::optional<Finding> look(const std::vector<int>& awaited);

    std::int64_t waited_ns() const { return waited_ns_; }

  private:
    friend class Waits;
    using Clock = std::chrono::steady_clock;
    using Key = std::pair<int, Occasion>;

    struct Asked {
        Clock::time_point since;
        bool sent = false;
        std::optional<Answer> answer;
    };

    void hear(int name, const Occasion& in, const Answer& answer);
    Answer known_locked(const Key& key) const;
    std::set<int> held_up_locked(const std::vector<Key>& reached, const std::set<int>& holding_up) const;

    Waits& waits_;
    const Occasion in_;
    const std::int64_t waited_ns_;
    const Clock::duration patience_;
    const Clock::time_point begun_ = Clock::now();
    std::optional<Clock::time_point> decided_;  // when the ranks to blame were first determined
    std::map<Key, Asked> asked_;                // guarded by the lock of `waits_`
};

// The ranks of a group: their names, and whether they have begun the failed call.
struct Members {
    std::function<int(int)> name;
    std::function<bool(int)> has_come;
    int size;
    // Whether `has_come` is false only for ranks that have not begun the call. Otherwise, a rank for which the call
    // does not wait may have finished its part and continued.
    bool is_certain = true;
};

// Sets the ranks of `outcome` that `found` blames. `absent` are the group ranks that have not begun the call, and
// `awaited` are the ranks for which it waits.
void blame(Outcome& outcome, const Finding& found, const Members& members, std::vector<int> absent,
           const std::vector<int>& awaited);

// Returns the cause for which the ranks of a group give up after a time-out.
Cause cause_of_time_out(const Outcome& outcome, const Members& members);

// Returns the cause for which the rank with the name `mine` leaves its other groups after `outcome`, or none if it may
// stay. `name` returns the name of a rank of the group.
Cause cause_of_leaving(const Outcome& outcome, int mine, const std::function<int(int)>& name);

}  // namespace paceline
