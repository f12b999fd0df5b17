// What travels on a group's control lanes. All numbers are in the machine's byte order: ranks of one job run on
// machines of one kind, which the handshake's magic stands for.
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
    refuse,   // the receive that an offer met is of another size or type
    credit,   // the receiver has taken `nbytes` of eager messages
    waiting,  // the sender waits in the call that follows
    verdict,  // why the sender gave up the group
    goodbye,  // the sender destroyed the group, because of the packed `Cause` in `id` if there is one
    ask,      // call `id` of group `offset` takes too long: what keeps the receiver from doing its part in it?
    answer,   // what keeps the sender, which the receiver asked about that call; `tag` is the kind of the `Answer`
};

struct Frame {
    std::uint32_t magic = kMagic;
    FrameKind kind{};
    std::uint64_t id = 0;      // of the message, given by its sender
    std::uint64_t nbytes = 0;  // of the message; of `waiting`, `verdict` and `answer`, what follows
    std::uint64_t offset = 0;  // data: where the part belongs; its length is in `part`
    std::uint32_t part = 0;
    std::int32_t tag = 0;
    DType dtype = DType::u8;
    std::uint8_t reserved[7] = {};

    static constexpr std::uint32_t kMagic = 0x504c4331;
};
static_assert(sizeof(Frame) == 48);

constexpr std::size_t kMostVerdictBytes = 96 << 10;

// A verdict as bytes and back; nullopt for what is none.
std::vector<std::uint8_t> encode(const Outcome& outcome);
std::optional<Outcome> decode(std::span<const std::uint8_t> bytes, int size);

// The ranks of an answer as bytes, and the answer that `frame` brings with them; nullopt for what is none.
std::vector<std::uint8_t> encode(const Answer& answer);
std::optional<Answer> decode_answer(const Frame& frame, std::span<const std::uint8_t> bytes);

// Whether `frame` is one that a rank may send at all.
bool is_sound(const Frame& frame);

}  // namespace paceline::executor
