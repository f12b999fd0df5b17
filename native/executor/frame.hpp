// The frames on a group's control lanes. All numbers are in the machine's byte order: the handshake's magic ensures
// that the ranks of a job run on machines of the same kind.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "call/call.hpp"
#include "call/waits.hpp"

namespace paceline::executor {

enum class FrameKind : std::uint32_t {
    eager = 1,  // a small message, with its bytes
    offer,      // a large message; its bytes follow once it is accepted
    accept,
    data,     // a part of an accepted message
    refuse,   // the receive that an offer matched has a different size or type
    credit,   // the receiver has consumed `nbytes` of eager messages
    waiting,  // the sender waits in the call in the body
    verdict,  // the reason why the sender broke the group
    goodbye,  // the sender destroyed the group, because of the packed `Cause` in `id` unless it is 0
    ask,      // call `id` of group `offset` has timed out: why has the receiver not finished its part?
    answer,   // the answer to `ask` about that call; `tag` is the kind of the `Answer`
};

struct Frame {
    std::uint32_t magic = kMagic;
    FrameKind kind{};
    std::uint64_t id = 0;      // the id of the message, assigned by its sender
    std::uint64_t nbytes = 0;  // the length of the message or, for `waiting`, `verdict` and `answer`, of the body
    std::uint64_t offset = 0;  // data: the offset of the part, whose length is in `part`
    std::uint32_t part = 0;
    std::int32_t tag = 0;
    DType dtype = DType::u8;
    std::uint8_t reserved[7] = {};

    static constexpr std::uint32_t kMagic = 0x504c4331;
};
static_assert(sizeof(Frame) == 48);

constexpr std::size_t kMostVerdictBytes = 96 << 10;

// Converts a verdict to bytes and back; nullopt if the bytes are not a verdict.
std::vector<std::uint8_t> encode(const Outcome& outcome);
std::optional<Outcome> decode(std::span<const std::uint8_t> bytes, int size);

// Converts the ranks of an answer to bytes, and these bytes and `frame` to the answer; nullopt if they are malformed.
std::vector<std::uint8_t> encode(const Answer& answer);
std::optional<Answer> decode_answer(const Frame& frame, std::span<const std::uint8_t> bytes);

// Whether `frame` is valid.
bool is_sound(const Frame& frame);

}  // namespace paceline::executor
