// What the store holds, and what each request does to it. No sockets, no clock.
#pragma once

#include <deque>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "store/message.hpp"

namespace paceline::store {

class Table {
  public:
    // The answer, or nothing when the request has to wait for a key.
    // `changed` is the list of keys that now exist or grew, for which others may be waiting.
    std::optional<Message> apply(const Message& request, std::vector<std::string>& changed);

    // Whether `key` is there for a request of `op`: as a value, as a queue, or (to wait and check) as either.
    bool holds(Op op, const std::string& key) const;

    // Of a request that waits, what it waits for.
    std::vector<std::string> missing(const Message& request) const;

  private:
    std::optional<Message> pop(const Message& request);

    std::unordered_map<std::string, std::string> values_;
    std::unordered_map<std::string, std::deque<std::string>> queues_;
};

}  // namespace paceline::store
