// The store's contents and the effect of each request on them. It uses no sockets and no clock.
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
    // Returns the answer, or nothing if the request has to wait for a key. `changed` receives the keys that now exist
    // or grew, since other requests may wait for them.
    std::optional<Message> apply(const Message& request, std::vector<std::string>& changed);

    // Returns whether `key` exists for a request of `op`: as a value, as a queue, or (for wait and check) as either.
    bool holds(Op op, const std::string& key) const;

    // Returns whether `key` names a non-empty queue and no value.
    bool is_queue(const std::string& key) const { return !values_.contains(key) && queues_.contains(key); }

    // Returns approximately how many bytes the keys and values occupy.
    std::size_t nbytes() const { return nbytes_; }

    // Returns the keys that have a value.
    std::vector<std::string> keys() const;

    // Returns the keys for which a waiting request waits.
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
