// Finds out which ranks hold up a call that has taken too long: it asks those that the call waits for whom they wait
// for themselves, and follows the answers over all groups. A rank that waits is not to blame; one that does not
// answer, or says that its program does not wait, is.
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

// By their names, in ascending order. If there are none in either list, the call is merely slow, and if there are only
// some that wait, they wait for each other.
struct Finding {
    std::vector<int> holding_up;
    std::vector<int> waiting;  // those that merely wait for one that holds them up, at once or through others
    std::vector<int> in_call;  // those in both lists for which the call itself waits, here or on another rank
};

class WaitChainSearch {
  public:
    // Into the call `in`, which has waited for `waited_ns` of the `timeout_ns` that it may take.
    WaitChainSearch(Waits& waits, Occasion in, std::int64_t timeout_ns, std::int64_t waited_ns);
    WaitChainSearch(const WaitChainSearch&) = delete;
    WaitChainSearch& operator=(const WaitChainSearch&) = delete;
    ~WaitChainSearch();

    // Goes on with the search; nullopt while answers may still come. `awaited` are the names of the ranks that the
    // call waits for now. One thread at a time may call this.
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
    std::optional<Clock::time_point> decided_;  // when it was first known who is to blame
    std::map<Key, Asked> asked_;                // guarded by the lock of `waits_`
};

// The ranks of a group: their names, and which of them have begun the call that has failed.
struct Members {
    std::function<int(int)> name;
    std::function<bool(int)> has_come;
    int size;
    // Whether `has_come` is false only for ranks that have not. Otherwise a rank for which the call does not wait may
    // have done its part and gone on.
    bool is_certain = true;
};

// Names in `outcome` the ranks that `found` blames. `absent` are the group ranks that have not come to the call, and
// `awaited` those that it waits for.
void blame(Outcome& outcome, const Finding& found, const Members& members, std::vector<int> absent,
           const std::vector<int>& awaited);

// The cause for which the ranks of a group give up after a time-out.
Cause cause_of_time_out(const Outcome& outcome, const Members& members);

// The cause for which a rank, `mine` by its name, leaves its other groups after `outcome`; none if it may stay. `name`
// returns the name of a rank of the group.
Cause cause_of_leaving(const Outcome& outcome, int mine, const std::function<int(int)>& name);

}  // namespace paceline
