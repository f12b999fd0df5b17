// The store's contents, and the effect of each request on them. Uses neither sockets nor a clock.
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
    // Applies a request. Returns the answer, or nullopt if the request must wait for a key. Appends the keys that were
    // created or extended to `changed`, because other requests may be waiting for them.
    std::optional<Message> apply(const Message& request, std::vector<std::string>& changed);

    // Returns true if `key` exists for operation `op`: as a value, as a queue, or as either (wait and check).
    bool holds(Op op, const std::string& key) const;

    // Returns true if `key` has a non-empty queue but no value.
    bool is_queue(const std::string& key) const { return !values_.contains(key) && queues_.contains(key); }

    // Returns the approximate number of bytes that the keys and values occupy.
    std::size_t nbytes() const { return nbytes_; }

    // Returns the keys that have a value.
    std::vector<std::string> keys() const;

    // Returns the keys for which a request still has to wait.
    std::vector<std::string> missing(const Message& request) const;

  private:
    std::optional<Message> pop(const Message& request);
    void assign(const std::string& key, std::string value);
    bool remove(const std::string& key);

    std::size_t nbytes_ = 0;

    std::unordered_map<std::string, std::string> values_;
    std::unordered_map<std::string, std::deque<std::string>> queues_;
};

}  // namespace paceline::store
