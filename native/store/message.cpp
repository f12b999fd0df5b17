#include "store/message.hpp"

#include <bit>
#include <cstring>

namespace paceline::store {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::size_t kPrefix = sizeof(std::uint32_t);

template <class T>
T take(const char*& at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    at += sizeof value;
    return value;
}

}  // namespace

void encode(const Message& message, std::string& out) {
    std::size_t nbytes = kMessageOverhead;
    for (const std::string& field : message.fields) nbytes += kFieldOverhead + field.size();
    out.reserve(out.size() + kPrefix + nbytes);
    append_number(out, static_cast<std::uint32_t>(nbytes));
    append_number(out, message.code);
    append_number(out, message.number);
    append_number(out, static_cast<std::uint32_t>(message.fields.size()));
    for (const std::string& field : message.fields) {
        append_number(out, static_cast<std::uint32_t>(field.size()));
        out.append(field);
    }
}

ParseResult decode(std::span<const char> bytes, Message& message, std::size_t& used) {
    if (bytes.size() < kPrefix) return ParseResult::partial;
    const char* at = bytes.data();
    const auto nbytes = take<std::uint32_t>(at);
    if (nbytes < kMessageOverhead || nbytes > kMaxFrame) return ParseResult::malformed;
    if (bytes.size() - kPrefix < nbytes) return ParseResult::partial;
    const char* const end = at + nbytes;
    message.code = take<std::uint8_t>(at);
    message.number = take<std::int64_t>(at);
    auto fields = take<std::uint32_t>(at);
    message.fields.clear();
    for (; fields != 0; --fields) {
        if (static_cast<std::size_t>(end - at) < kPrefix) return ParseResult::malformed;
        const auto length = take<std::uint32_t>(at);
        if (static_cast<std::size_t>(end - at) < length) return ParseResult::malformed;
        message.fields.emplace_back(at, length);
        at += length;
    }
    if (at != end) return ParseResult::malformed;
    used = kPrefix + nbytes;
    return ParseResult::complete;
}

}  // namespace paceline::store
