#include "store/parked_requests.hpp"

#include <algorithm>

namespace paceline::store {

void ParkedRequests::park(Id id, Message request, Time deadline, const Table& table, bool is_exclusive) {
    ParkedRequest& parked = requests_[id];
    parked = {std::move(request), deadline, is_exclusive, 0};
    by_deadline_.emplace(deadline, id);
    register_next(id, parked, 0, table);
}

// Registers the request under the first missing key at or after index `from`. The search wraps around once, because
// earlier keys may have been deleted.
void ParkedRequests::register_next(Id id, ParkedRequest& parked, std::size_t from, const Table& table) {
    const std::vector<std::string>& keys = parked.request.fields;
    const auto op = static_cast<Op>(parked.request.code);
    std::size_t at = from;
    while (at < keys.size() && table.holds(op, keys[at])) ++at;
    if (at == keys.size()) {
        at = 0;
        while (at + 1 < keys.size() && table.holds(op, keys[at])) ++at;
    }
    parked.missing_index = at;
    by_key_[keys[at]].push_back(id);
}

void ParkedRequests::unregister(Id id, const ParkedRequest& parked) {
    const auto found = by_key_.find(parked.request.fields[parked.missing_index]);
    if (found == by_key_.end()) return;
    std::erase(found->second, id);
    if (found->second.empty()) by_key_.erase(found);
}

void ParkedRequests::remove(Id id) {
    const auto found = requests_.find(id);
    if (found == requests_.end()) return;
    unregister(id, found->second);
    by_deadline_.erase({found->second.deadline, id});
    requests_.erase(found);
}

ParkedRequests::Answers ParkedRequests::wake(Table& table, std::vector<std::string>& changed) {
    Answers answers;
    for (std::size_t next = 0; next < changed.size(); ++next) {  // answered requests may append further keys
        const auto found = by_key_.find(changed[next]);
        if (found == by_key_.end()) continue;
        const std::vector<Id> ids = std::move(found->second);
        by_key_.erase(found);
        const bool has_turns = table.is_queue(changed[next]);
        bool is_taken = false;
        for (const Id id : ids) {
            ParkedRequest& parked = requests_.at(id);
            if (has_turns && parked.is_exclusive && std::exchange(is_taken, true)) {
                by_key_[changed[next]].push_back(id);
                continue;
            }
            const std::vector<std::string>& keys = parked.request.fields;
            const auto op = static_cast<Op>(parked.request.code);
            std::size_t at = parked.missing_index;
            while (at < keys.size() && table.holds(op, keys[at])) ++at;
            std::optional<Message> answer;
            if (at == keys.size()) answer = table.apply(parked.request, changed);
            if (!answer) {
                register_next(id, parked, at, table);
                continue;
            }
            by_deadline_.erase({parked.deadline, id});
            requests_.erase(id);
            answers.emplace_back(id, std::move(*answer));
        }
    }
    changed.clear();
    return answers;
}

ParkedRequests::Answers ParkedRequests::expire(Time now, const Table& table) {
    Answers answers;
    while (!by_deadline_.empty() && by_deadline_.begin()->first <= now) {
        const Id id = by_deadline_.begin()->second;
        answers.emplace_back(
            id, Message{static_cast<std::uint8_t>(Status::timed_out), 0, table.missing(requests_.at(id).request)});
        remove(id);
    }
    return answers;
}

std::optional<ParkedRequests::Time> ParkedRequests::next_deadline() const {
    if (by_deadline_.empty()) return std::nullopt;
    return by_deadline_.begin()->first;
}

}  // namespace paceline::store
