// Requests that wait for a key, each under the one key it misses first. No sockets, and no clock but the caller's.
//
// A key's arrival costs only those that wait for it, so that a thousand ranks that each wait for a thousand keys do
// not look at every key a thousand times a thousand times.
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
    using Id = int;  // of the connection; each has at most one request that waits
    using Time = std::chrono::steady_clock::time_point;
    using Answers = std::vector<std::pair<Id, Message>>;

    // `request` is one that `table` did not answer.
    void park(Id id, Message request, Time deadline, const Table& table);
    bool holds(Id id) const { return parked_.contains(id); }
    void forget(Id id);

    // Answers those whose keys are there now, those that asked first before the others. `changed` ends empty.
    Answers wake(Table& table, std::vector<std::string>& changed);
    // Answers those whose time is over with the keys that are missing.
    Answers expire(Time now, const Table& table);
    std::optional<Time> next_deadline() const;

  private:
    struct Parked {
        Message request;
        Time deadline;
        std::size_t misses = 0;  // index of the field it is registered under
    };

    void register_next(Id id, Parked& parked, std::size_t from, const Table& table);
    void unregister(Id id, const Parked& parked);

    std::unordered_map<Id, Parked> parked_;
    std::unordered_map<std::string, std::vector<Id>> by_key_;
    std::set<std::pair<Time, Id>> by_deadline_;
};

}  // namespace paceline::store
