// The shared memory of a host group: a control page and four slots per rank. The control pages of all ranks are
// followed by all slots. Communication proceeds in rounds, which every rank numbers from 1. A rank *publishes* round r
// by filling cell and slot r mod 4 and then releasing r into the cell's `round`; it *awaits* round r by acquiring r
// from every peer's cell. It publishes r only after it has read everything that its peers published for r - 2, so a
// slot is not overwritten before every rank has read it. Each rank writes only to its own page and slots, except that
// peers modify `sleepers`. A rank that fails the call withdraws the round numbers of the failed call from its cells.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "call/call.hpp"
#include "process/cores.hpp"
#include "process/locality_domain.hpp"
#include "shm/rank_set.hpp"

namespace paceline::host {

constexpr std::size_t kInline = 72;

struct alignas(128) Cell {
    std::atomic<std::uint32_t> round{0};
    std::uint32_t reserved = 0;
    CallHeader header{};
    alignas(8) std::uint8_t payload[kInline] = {};  // small data, in the same two cache lines as the header
};
static_assert(sizeof(Cell) == 128);

// `left`: the rank destroyed the group after publishing all data that its peers needed. `starved`: the rank ran out of
// descriptors or memory when it mapped another rank's memory; `missing` is the rank itself.
enum class ExitReason : std::uint32_t { none, timed_out, peer_lost, interrupted, left, starved };

// Returns the outcome code for a rank that failed the call for this reason, or `ok` if the group is not broken.
constexpr OutcomeCode code_of(ExitReason reason) {
    switch (reason) {
        case ExitReason::none:
        case ExitReason::left:
            return OutcomeCode::ok;
        case ExitReason::timed_out:
            return OutcomeCode::timed_out;
        case ExitReason::peer_lost:
            return OutcomeCode::peer_lost;
        case ExitReason::interrupted:
            return OutcomeCode::interrupted;
        case ExitReason::starved:
            return OutcomeCode::starved;
    }
    return OutcomeCode::ok;
}

constexpr std::size_t kLine = 64;  // size of a cache line in bytes

// Returns `nbytes` rounded up to whole cache lines.
constexpr std::size_t in_lines(std::size_t nbytes) {
    return (nbytes + kLine - 1) / kLine * kLine;
}
// Returns the number of bytes that each round stages in a slot of `room` bytes, for a message of `nbytes` bytes: a
// whole number of cache lines, at least one.
constexpr std::size_t staged(std::size_t nbytes, std::size_t room) {
    return std::clamp(in_lines(nbytes), kLine, room / kLine * kLine);
}

constexpr std::uint32_t kSlots = 4;
// The size of a slot with two ranks, as a multiple of `slot_bytes`. Long all-reduces use the whole slot and therefore
// wait only a third as often. They take 20% less time for 1 MiB and 30% less for 4 MiB. reduce_scatter also uses the
// whole slot because, with an update, larger parts absorb more of one rank's delays. With four ranks on two cores,
// larger slots did not speed up a step with an update. Shorter calls rotate through the slot (`set_stage_bytes`), so
// that each rank writes 1.5 MiB before it reuses a cache line. Doubling this amount was no faster.
constexpr std::size_t kSlotFactorOfTwoRanks = 3;

constexpr std::uint32_t kMaxBlockedBy = 16;

// The reason why a rank failed its call or left the group.
struct FailureReport {
    shm::RankSet missing{};  // group ranks that did not arrive
    shm::RankSet gone{};     // the ranks in `missing` that died or left
    shm::RankSet left{};     // the ranks in `missing` that left
    shm::RankSet waiting{};  // the ranks in `missing` that are waiting in other calls
    std::int64_t waited_ns = 0;
    std::uint32_t cause = 0;  // a packed `FailureCause`: why the ranks in `gone`, or this rank, failed the call
    bool has_begun = false;   // see `Outcome`
    std::uint32_t blocked_by_count = 0;
    std::int32_t blocked_by[kMaxBlockedBy] = {};  // see `Outcome`
};

struct ControlPage {
    Cell cells[kSlots];
    alignas(128) std::atomic<std::uint32_t> sleepers{0};                 // number of peers asleep on this rank's cells
    alignas(128) std::atomic<ExitReason> exit_reason{ExitReason::none};  // stored with release after the failure report
    FailureReport failure_report;
    // Nonzero after the rank has aborted the group. Separate from the failure report, because any thread may set it
    // while the thread that runs a call writes the failure report.
    alignas(128) std::atomic<std::uint32_t> aborted{0};
    Cores cores;            // the rank's cores, set once at the start
    LocalityDomain domain;  // the rank's domain, set once at the start
};
static_assert(std::is_standard_layout_v<ControlPage>);

constexpr std::size_t kControlBytes = 4096;
static_assert(sizeof(ControlPage) <= kControlBytes);

}  // namespace paceline::host
