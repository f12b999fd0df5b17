// The format of the store's requests and answers.
//
//   u32 bytes that follow | u8 code | i64 number | u32 fields | (u32 length | bytes) for each field
// Numbers are little-endian. A field's memory is allocated only as its bytes arrive, so an incorrect length cannot
// cause a large allocation.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace paceline::store {

// Appends the bytes of a number in the machine's byte order, which is little-endian.
template <class T>
void append_number(std::string& out, T value) {
    char bytes[sizeof(T)];
    std::memcpy(bytes, &value, sizeof value);
    out.append(bytes, sizeof bytes);
}

enum class Op : std::uint8_t {
    set = 1,
    get,          // number: milliseconds to wait
    add,          // number: the amount
    compare_set,  // key, expected, desired
    wait,         // number: milliseconds to wait
    check,
    remove,
    count,
    multi_get,  // number: milliseconds to wait
    multi_set,  // key, value, key, value, ...
    append,
    queue_push,
    queue_pop,  // number: milliseconds to wait
    queue_length,
    last_will,  // key, value: set when the connection ends; number 1 revokes the will (handled by the server)
    list_keys,
};

// `closing` is not an answer: the server sends it as its last message before an orderly shutdown.
enum class Status : std::uint8_t { ok = 0, timed_out, refused, closing };

constexpr std::uint32_t kMaxFrame = std::uint32_t{1} << 30;  // maximum size of a message without its length field
constexpr std::size_t kMessageOverhead = sizeof(std::uint8_t) + sizeof(std::int64_t) + sizeof(std::uint32_t);
constexpr std::size_t kFieldOverhead = sizeof(std::uint32_t);
constexpr std::size_t kReadBytes = 64 << 10;  // bytes per read, on both sides
constexpr std::size_t kKeptBytes = 1 << 20;   // larger buffers are freed after use

struct Message {
    std::uint8_t code = 0;
    std::int64_t number = 0;
    std::vector<std::string> fields;
};

void encode(const Message& message, std::string& out);

enum class ParseResult { complete, partial, malformed };

// Decodes one message from the front of `bytes`. Sets `used` to its length if it is complete.
ParseResult decode(std::span<const char> bytes, Message& message, std::size_t& used);

}  // namespace paceline::store
