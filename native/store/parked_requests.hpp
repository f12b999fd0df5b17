// Requests that wait for keys. Each is registered under its first missing key. Uses no sockets; the caller passes the
// current time.
//
// The cost of setting a key depends only on the requests registered under that key. Even if a thousand ranks wait for a
// thousand keys each, setting one key does not require a search through a million registrations.
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

class ParkedRequests {
  public:
    using Id = int;  // identifies the connection, which has at most one waiting request
    using Time = std::chrono::steady_clock::time_point;
    using Answers = std::vector<std::pair<Id, Message>>;

    // Adds a request that `table` could not answer. A value pushed to a queue wakes only the first request with
    // `is_exclusive`; its client then pops the value with another request.
    void park(Id id, Message request, Time deadline, const Table& table, bool is_exclusive = false);
    bool holds(Id id) const { return requests_.contains(id); }
    void remove(Id id);

    // Answers the requests whose keys now exist, in order of arrival, and clears `changed`.
    Answers wake(Table& table, std::vector<std::string>& changed);
    // Answers the requests that have timed out; each answer lists the missing keys.
    Answers expire(Time now, const Table& table);
    std::optional<Time> next_deadline() const;

  private:
    struct ParkedRequest {
        Message request;
        Time deadline;
        bool is_exclusive;
        std::size_t missing_index = 0;  // index of the key under which the request is registered
    };

    void register_next(Id id, ParkedRequest& parked, std::size_t from, const Table& table);
    void unregister(Id id, const ParkedRequest& parked);

    std::unordered_map<Id, ParkedRequest> requests_;
    std::unordered_map<std::string, std::vector<Id>> by_key_;
    std::set<std::pair<Time, Id>> by_deadline_;
};

}  // namespace paceline::store
