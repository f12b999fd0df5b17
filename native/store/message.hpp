// The store's requests and answers, which share one format.
//
//   u32 bytes that follow | u8 code | i64 number | u32 fields | (u32 length | bytes) for each field
// Numbers are little-endian. No memory is allocated for a length before that many bytes have arrived.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace paceline::store {

// Appends the bytes of a number in the byte order of the machine, which is little-endian.
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
    last_will,  // key, value: set when the connection ends; number 1 revokes the key's will. Only servers keep wills
};

// `closing` does not answer a request: it is the server's last message before an orderly shutdown.
enum class Status : std::uint8_t { ok = 0, timed_out, refused, closing };

constexpr std::uint32_t kMaxFrame = std::uint32_t{1} << 30;  // the most bytes of a message after its length
constexpr std::size_t kMessageOverhead = sizeof(std::uint8_t) + sizeof(std::int64_t) + sizeof(std::uint32_t);
constexpr std::size_t kFieldOverhead = sizeof(std::uint32_t);
constexpr std::size_t kReadBytes = 64 << 10;  // the bytes that either end reads at once
constexpr std::size_t kKeptBytes = 1 << 20;   // a larger buffer is freed after use

struct Message {
    std::uint8_t code = 0;
    std::int64_t number = 0;
    std::vector<std::string> fields;
};

void encode(const Message& message, std::string& out);

enum class Parse { complete, partial, malformed };

// Decodes one message from the front of `bytes`; `used` is set to its length when it is complete.
Parse decode(std::span<const char> bytes, Message& message, std::size_t& used);

}  // namespace paceline::store
