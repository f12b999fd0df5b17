// The frames on a group's control lanes. All numbers are in the machine's byte order, which must be the same on all
// ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "call/call.hpp"
#include "call/wait_registry.hpp"

namespace paceline::executor {

enum class FrameKind : std::uint32_t {
    eager = 1,  // a small message, with its bytes
    offer,      // a large message; its bytes follow once it is accepted
    accept,
    data,     // a part of an accepted message
    refuse,   // rejects an offer: the matching receive has a different size or dtype
    credit,   // the receiver has consumed `nbytes` bytes of eager messages
    waiting,  // the sender is waiting in the call described in the body
    failure,  // the reason why the sender broke the group
    goodbye,  // the sender destroyed the group; `id` is the packed `FailureCause`, or 0
    query,    // asks why the receiver has not finished its part of call `id` in group `offset`; the call has timed out
    answer,   // the answer to `query` about that call; `tag` is the kind of the `Answer`
};

struct Frame {
    std::uint32_t magic = kMagic;
    FrameKind kind{};
    std::uint64_t id = 0;      // the id of the message, assigned by its sender
    std::uint64_t nbytes = 0;  // the length of the message or, for `waiting`, `failure` and `answer`, of the body
    std::uint64_t offset = 0;  // data: the offset of the part, whose length is in `part`
    std::uint32_t part = 0;
    std::int32_t tag = 0;
    DType dtype = DType::u8;
    std::uint8_t reserved[7] = {};

    static constexpr std::uint32_t kMagic = 0x504c4331;
};
static_assert(sizeof(Frame) == 48);

constexpr std::size_t kMaxFailureBytes = 96 << 10;

// These functions convert a failure report to bytes and back. `decode` returns nullopt if the bytes are not a valid
// failure report.
std::vector<std::uint8_t> encode(const Outcome& outcome);
std::optional<Outcome> decode(std::span<const std::uint8_t> bytes, int size);

// These functions convert the ranks in an answer to bytes and back; the other fields are in `frame`. `decode_answer`
// returns nullopt if the input is malformed.
std::vector<std::uint8_t> encode(const Answer& answer);
std::optional<Answer> decode_answer(const Frame& frame, std::span<const std::uint8_t> bytes);

// Returns true if `frame` is valid.
bool is_valid(const Frame& frame);

}  // namespace paceline::executor
