// The memory that each rank of a group shares with the others: a control page and four slots. The group's memory begins
// with the pages of all ranks, followed by the slots.
// Work proceeds in rounds, numbered from 1 in the same way on every rank. A rank *publishes* round r by filling cell
// and slot r mod 4 and then releasing r into the cell's `round`; it *awaits* round r by acquiring r from every peer's
// cell. It publishes r only after it has read everything that its peers published for r - 2, so a slot is not
// overwritten before every rank has read it. Only the owner writes to its part, except for `sleepers`. A rank that
// gives up withdraws its marks of the rounds of the failed call.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "call/call.hpp"
#include "process/cores.hpp"
#include "process/domain.hpp"
#include "shm/rank_set.hpp"

namespace paceline::host {

constexpr std::size_t kInline = 72;

struct alignas(128) Cell {
    std::atomic<std::uint32_t> round{0};
    std::uint32_t reserved = 0;
    CallHeader header{};
    alignas(8) std::uint8_t payload[kInline] = {};  // small data travels in the same two cache lines
};
static_assert(sizeof(Cell) == 128);

// `left`: the rank destroyed the group after it had published everything that its peers needed.
// `starved`: the rank had no descriptors or memory left to map another rank's memory; `missing` is the rank itself.
enum class GaveUp : std::uint32_t { no, timed_out, peer_lost, interrupted, left, starved };

// Returns the code with which a rank that gave up broke the group, or `ok` if it did not break it.
constexpr Code code_of(GaveUp reason) {
    switch (reason) {
        case GaveUp::no:
        case GaveUp::left:
            return Code::ok;
        case GaveUp::timed_out:
            return Code::timed_out;
        case GaveUp::peer_lost:
            return Code::peer_lost;
        case GaveUp::interrupted:
            return Code::interrupted;
        case GaveUp::starved:
            return Code::starved;
    }
    return Code::ok;
}

constexpr std::size_t kLine = 64;  // bytes of a cache line

// Returns `nbytes` rounded up to whole cache lines.
constexpr std::size_t in_lines(std::size_t nbytes) {
    return (nbytes + kLine - 1) / kLine * kLine;
}
// Returns how many bytes of a slot with `room` bytes are used at a time to stage `nbytes`: whole lines, at least one.
constexpr std::size_t staged(std::size_t nbytes, std::size_t room) {
    return std::clamp(in_lines(nbytes), kLine, room / kLine * kLine);
}

constexpr std::uint32_t kSlots = 4;
// In a group of two ranks, a slot has this many times the room that most calls stage at a time. Long sums use it, which
// then wait a third as often (1 MiB takes 0.8 of the time, 4 MiB 0.7), and so does reduce_scatter: with an update it
// works longer on each part, and larger parts absorb more of the delays of one rank. With four ranks on two cores, a
// step with an update was not faster with this room. Shorter calls rotate through the room (see `stage_in`), so that
// each of the two ranks writes 1.5 MiB before it writes to the same line again; twice as much was no faster.
constexpr std::size_t kRoomOfTwo = 3;

constexpr std::uint32_t kMostHeldBy = 16;

// The reason why a rank gave up.
struct Verdict {
    shm::RankSet missing{};  // group ranks that did not arrive
    shm::RankSet gone{};     // the ranks in `missing` that died or left
    shm::RankSet left{};     // the ranks in `missing` that left
    shm::RankSet waiting{};  // the ranks in `missing` that wait in other calls
    std::int64_t waited_ns = 0;
    std::uint32_t cause = 0;  // a packed `Cause`: the reason why those ranks, or this rank, gave up
    bool came = false;        // the ranks in `missing` have begun the call
    std::uint32_t held_by_count = 0;
    std::int32_t held_by[kMostHeldBy] = {};  // see `Outcome`
};

struct Control {
    Cell cells[kSlots];
    alignas(128) std::atomic<std::uint32_t> sleepers{0};   // peers asleep on one of the cells
    alignas(128) std::atomic<GaveUp> gave_up{GaveUp::no};  // released after the verdict
    Verdict verdict;
    // Not 0 once the rank has aborted the group. It is separate because any thread of the rank may set it while the
    // thread that runs a call writes the verdict.
    alignas(128) std::atomic<std::uint32_t> aborted{0};
    Cores cores;    // the rank's cores, set once at the start
    Domain domain;  // the rank's domain, set once at the start
};
static_assert(std::is_standard_layout_v<Control>);

constexpr std::size_t kControlBytes = 4096;
static_assert(sizeof(Control) <= kControlBytes);

}  // namespace paceline::host
