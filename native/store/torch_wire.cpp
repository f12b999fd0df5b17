#include "store/torch_wire.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>

namespace paceline::store {
namespace {

static_assert(std::endian::native == std::endian::little);

struct QueryShape {
    std::optional<Op> op;       // the equivalent operation of the table
    bool many = false;          // whether the query begins with the number of items
    std::uint64_t strings = 0;  // strings per item: a key followed by values
    std::size_t number = 0;     // size in bytes of the number at the end
};

std::optional<QueryShape> shape_of(TorchQuery query) {
    switch (query) {
        case TorchQuery::validate:
        case TorchQuery::ping:
            return QueryShape{std::nullopt, false, 0, sizeof(std::uint32_t)};
        case TorchQuery::set:
            return QueryShape{Op::set, false, 2};
        case TorchQuery::compare_set:
            return QueryShape{Op::compare_set, false, 3};
        case TorchQuery::get:
            return QueryShape{Op::get, false, 1};
        case TorchQuery::add:
            return QueryShape{Op::add, false, 1, sizeof(std::int64_t)};
        case TorchQuery::check:
            return QueryShape{Op::check, true, 1};
        case TorchQuery::wait:
            return QueryShape{Op::wait, true, 1};
        case TorchQuery::count:
            return QueryShape{Op::count};
        case TorchQuery::remove:
            return QueryShape{Op::remove, false, 1};
        case TorchQuery::append:
            return QueryShape{Op::append, false, 2};
        case TorchQuery::multi_get:
            return QueryShape{Op::multi_get, true, 1};
        case TorchQuery::multi_set:
            return QueryShape{Op::multi_set, true, 2};
        case TorchQuery::queue_push:
            return QueryShape{Op::queue_push, false, 2};
        case TorchQuery::queue_pop:
            return QueryShape{Op::queue_pop, false, 1};
        case TorchQuery::queue_length:
            return QueryShape{Op::queue_length, false, 1};
        case TorchQuery::cancel_wait:
        case TorchQuery::list_keys:
            return QueryShape{};
        case TorchQuery::barrier:
            return QueryShape{Op::add, false, 1, sizeof(std::int64_t)};
    }
    return std::nullopt;
}

template <class T>
T number_at(std::span<const char> bytes, std::size_t at) {
    T value;
    std::memcpy(&value, bytes.data() + at, sizeof value);
    return value;
}

void append_text(std::string& out, const std::string& value) {
    append_number(out, static_cast<std::uint64_t>(value.size()));
    out.append(value);
}

// PyTorch's server returns an empty value for a missing key; its clients wait for the key first.
void put_value(std::string& out, const std::string& key, Table& table, std::vector<std::string>& changed) {
    const auto found = table.apply({static_cast<std::uint8_t>(Op::get), 0, {key}}, changed);
    append_text(out, found ? found->fields[0] : std::string());
}

}  // namespace

ParseResult TorchReader::read(std::span<const char> bytes, std::size_t& used) {
    if (bytes.empty()) return ParseResult::partial;
    query_ = static_cast<TorchQuery>(bytes[0]);
    const auto shape = shape_of(query_);
    if (!shape) return ParseResult::malformed;
    if (at_ == 0) {
        at_ = 1;
        request_ = {static_cast<std::uint8_t>(shape->op.value_or(Op::count)), 0, {}};
        counted_ = !shape->many;
        left_ = shape->strings;
    }
    if (!counted_) {
        if (bytes.size() - at_ < sizeof(std::uint64_t)) return ParseResult::partial;
        const auto items = number_at<std::uint64_t>(bytes, at_);
        if (items > kMaxTorchKeys) return ParseResult::malformed;
        at_ += sizeof(std::uint64_t);
        counted_ = true;
        left_ = items * shape->strings;
    }
    for (; left_ != 0; --left_) {
        if (bytes.size() - at_ < sizeof(std::uint64_t)) return ParseResult::partial;
        const auto length = number_at<std::uint64_t>(bytes, at_);
        const bool is_key = request_.fields.size() % shape->strings == 0;
        if (length > (is_key ? kMaxTorchKeyBytes : kMaxTorchValueBytes) || at_ + length > kMaxFrame)
            return ParseResult::malformed;
        if (bytes.size() - at_ - sizeof(std::uint64_t) < length) return ParseResult::partial;
        at_ += sizeof(std::uint64_t);
        request_.fields.emplace_back(bytes.data() + at_, length);
        at_ += length;
    }
    if (bytes.size() - at_ < shape->number) return ParseResult::partial;
    if (shape->number == sizeof(std::uint32_t)) request_.number = number_at<std::uint32_t>(bytes, at_);
    if (shape->number == sizeof(std::int64_t)) request_.number = number_at<std::int64_t>(bytes, at_);
    used = at_ + shape->number;
    at_ = 0;
    return ParseResult::complete;
}

void encode(TorchWaitReply answer, std::string& out) {
    append_number(out, static_cast<std::uint8_t>(answer));
}

TorchOutcome apply(TorchQuery query, const Message& request, Table& table, std::vector<std::string>& changed,
                   std::string& out) {
    switch (query) {
        case TorchQuery::ping:
            append_number(out, static_cast<std::uint32_t>(request.number));
            return TorchOutcome::answered;
        case TorchQuery::get:
        case TorchQuery::multi_get:
            for (const std::string& key : request.fields) {
                put_value(out, key, table, changed);
                if (out.size() > kMaxTorchBytes / 4) return TorchOutcome::refused;
            }
            return TorchOutcome::answered;
        case TorchQuery::list_keys: {
            const std::vector<std::string> keys = table.keys();
            append_number(out, static_cast<std::int64_t>(keys.size()));
            for (const std::string& key : keys) append_text(out, key);
            return TorchOutcome::answered;
        }
        case TorchQuery::queue_pop: {
            const Message length_request{static_cast<std::uint8_t>(Op::queue_length), 0, request.fields};
            const auto length = table.apply(length_request, changed);
            append_number(out, length->number);
            if (length->number > 0) append_text(out, table.apply(request, changed)->fields[0]);
            return TorchOutcome::answered;
        }
        default:
            break;
    }
    const auto answer = table.apply(request, changed);
    if (!answer) return TorchOutcome::waits;
    if (answer->code != static_cast<std::uint8_t>(Status::ok)) return TorchOutcome::refused;
    switch (query) {
        case TorchQuery::compare_set:
            append_text(out, answer->fields[0]);
            break;
        case TorchQuery::check:
            append_number(out, static_cast<std::uint8_t>(answer->number == 0));  // 0 means ready
            break;
        case TorchQuery::wait:
            encode(TorchWaitReply::over, out);
            break;
        case TorchQuery::add:
        case TorchQuery::count:
        case TorchQuery::remove:
        case TorchQuery::queue_length:
            append_number(out, answer->number);
            break;
        default:
            break;
    }
    return TorchOutcome::answered;
}

}  // namespace paceline::store
