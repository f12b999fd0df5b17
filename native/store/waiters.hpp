// Requests that wait for keys, each registered under its first missing key. The class uses no sockets, and the clock of
// the caller.
//
// Setting a key takes work only for the requests that are registered under it. A thousand ranks that each wait for a
// thousand keys therefore do not cause a million checks of every key.
#pragma once

#include <chrono>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "store/table.hpp"

namespace paceline::store {

class Waiters {
  public:
    using Id = int;  // the id of the connection, which has at most one waiting request
    using Time = std::chrono::steady_clock::time_point;
    using Answers = std::vector<std::pair<Id, Message>>;

    // `request` must be a request that `table` did not answer. Of the requests with `takes_turns`, each value pushed to
    // a queue wakes only the first, whose client pops the value with another request.
    void park(Id id, Message request, Time deadline, const Table& table, bool takes_turns = false);
    bool holds(Id id) const { return parked_.contains(id); }
    void forget(Id id);

    // Answers the requests whose keys now exist, earlier requests before later ones, and leaves `changed` empty.
    Answers wake(Table& table, std::vector<std::string>& changed);
    // Answers the requests that have timed out with the keys that are missing.
    Answers expire(Time now, const Table& table);
    std::optional<Time> next_deadline() const;

  private:
    struct Parked {
        Message request;
        Time deadline;
        bool takes_turns;
        std::size_t misses = 0;  // the index of the key under which it is registered
    };

    void register_next(Id id, Parked& parked, std::size_t from, const Table& table);
    void unregister(Id id, const Parked& parked);

    std::unordered_map<Id, Parked> parked_;
    std::unordered_map<std::string, std::vector<Id>> by_key_;
    std::set<std::pair<Time, Id>> by_deadline_;
};

}  // namespace paceline::store
