#include "store/table.hpp"

#include <charconv>

namespace paceline::store {
namespace {

Message ok(std::int64_t number = 0, std::vector<std::string> fields = {}) {
    return {static_cast<std::uint8_t>(Status::ok), number, std::move(fields)};
}

// Memory overhead in bytes per key or queued value.
constexpr std::size_t kEntry = 128;

Message refused(std::string why) {
    return {static_cast<std::uint8_t>(Status::refused), 0, {std::move(why)}};
}

std::size_t fields_needed(Op op) {
    switch (op) {
        case Op::count:
        case Op::list_keys:
            return 0;
        case Op::set:
        case Op::append:
        case Op::queue_push:
        case Op::last_will:
            return 2;
        case Op::compare_set:
            return 3;
        default:
            return 1;
    }
}

}  // namespace

bool Table::holds(Op op, const std::string& key) const {
    if (op == Op::queue_pop) return queues_.contains(key);
    if (values_.contains(key)) return true;
    return op != Op::get && op != Op::multi_get && queues_.contains(key);
}

std::vector<std::string> Table::keys() const {
    std::vector<std::string> keys;
    for (const auto& [key, value] : values_) keys.push_back(key);
    return keys;
}

std::vector<std::string> Table::missing(const Message& request) const {
    std::vector<std::string> keys;
    for (const std::string& key : request.fields)
        if (!holds(static_cast<Op>(request.code), key)) keys.push_back(key);
    return keys;
}

std::optional<Message> Table::pop(const Message& request) {
    const auto queue = queues_.find(request.fields[0]);
    if (queue == queues_.end()) return std::nullopt;
    std::string value = std::move(queue->second.front());
    nbytes_ -= kEntry + value.size();
    queue->second.pop_front();
    if (queue->second.empty()) {
        nbytes_ -= kEntry + queue->first.size();
        queues_.erase(queue);
    }
    return ok(0, {std::move(value)});
}

void Table::assign(const std::string& key, std::string value) {
    const auto [entry, is_new] = values_.try_emplace(key);
    nbytes_ += (is_new ? kEntry + key.size() : 0) + value.size() - entry->second.size();
    entry->second = std::move(value);
}

bool Table::remove(const std::string& key) {
    const auto value = values_.find(key);
    const auto queue = queues_.find(key);
    const bool is_there = value != values_.end() || queue != queues_.end();
    if (value != values_.end()) {
        nbytes_ -= kEntry + key.size() + value->second.size();
        values_.erase(value);
    }
    if (queue != queues_.end()) {
        nbytes_ -= kEntry + key.size();
        for (const std::string& each : queue->second) nbytes_ -= kEntry + each.size();
        queues_.erase(queue);
    }
    return is_there;
}

std::optional<Message> Table::apply(const Message& request, std::vector<std::string>& changed) {
    const auto op = static_cast<Op>(request.code);
    const std::vector<std::string>& field = request.fields;
    const bool many = op == Op::wait || op == Op::check || op == Op::multi_get || op == Op::multi_set;
    if (!many && field.size() != fields_needed(op)) return refused("wrong number of fields");
    switch (op) {
        case Op::set:
            assign(field[0], field[1]);
            changed.push_back(field[0]);
            return ok();
        case Op::get:
        case Op::multi_get: {
            Message answer = ok();
            for (const std::string& key : field) {
                const auto found = values_.find(key);
                if (found == values_.end()) return std::nullopt;
                answer.fields.push_back(found->second);
            }
            return answer;
        }
        case Op::add: {
            const auto found = values_.find(field[0]);
            const std::string value = found == values_.end() ? std::string() : found->second;
            std::int64_t number = 0;
            const auto parsed = std::from_chars(value.data(), value.data() + value.size(), number);
            if (!value.empty() && (parsed.ec != std::errc() || parsed.ptr != value.data() + value.size()))
                return refused("the value of the key is not a number, so nothing can be added to it");
            if (__builtin_add_overflow(number, request.number, &number)) return refused("the sum exceeds 64 bits");
            assign(field[0], std::to_string(number));
            changed.push_back(field[0]);
            return ok(number);
        }
        case Op::compare_set: {
            const auto found = values_.find(field[0]);
            if (found == values_.end() && !field[1].empty()) return ok(0, {field[1]});
            if (found != values_.end() && found->second != field[1]) return ok(0, {found->second});
            assign(field[0], field[2]);
            changed.push_back(field[0]);
            return ok(0, {field[2]});
        }
        case Op::wait:
            if (!missing(request).empty()) return std::nullopt;
            return ok();
        case Op::check:
            return ok(missing(request).empty() ? 1 : 0);
        case Op::remove:
            return ok(static_cast<std::int64_t>(remove(field[0])));
        case Op::count:
            return ok(static_cast<std::int64_t>(values_.size() + queues_.size()));
        case Op::multi_set:
            if (field.size() % 2 != 0) return refused("wrong number of fields");
            for (std::size_t i = 0; i < field.size(); i += 2) {
                assign(field[i], field[i + 1]);
                changed.push_back(field[i]);
            }
            return ok();
        case Op::append:
            if (const auto [entry, is_new] = values_.try_emplace(field[0]); true) {
                nbytes_ += (is_new ? kEntry + field[0].size() : 0) + field[1].size();
                entry->second += field[1];
            }
            changed.push_back(field[0]);
            return ok();
        case Op::queue_push:
            if (const auto [entry, is_new] = queues_.try_emplace(field[0]); true) {
                nbytes_ += (is_new ? kEntry + field[0].size() : 0) + kEntry + field[1].size();
                entry->second.push_back(field[1]);
            }
            changed.push_back(field[0]);
            return ok();
        case Op::queue_pop:
            return pop(request);
        case Op::queue_length: {
            const auto queue = queues_.find(field[0]);
            return ok(queue == queues_.end() ? 0 : static_cast<std::int64_t>(queue->second.size()));
        }
        case Op::last_will:
            return ok();
        case Op::list_keys:
            return ok(0, keys());
    }
    return refused("unknown operation");
}

}  // namespace paceline::store
