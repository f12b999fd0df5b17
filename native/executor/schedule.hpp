// The steps of one rank in a collective, as plain data. paceline.comm.schedule builds and verifies schedules;
// executor.hpp runs them. src/paceline/comm/schedule/steps.py defines the terms.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "wire/wire.hpp"

namespace paceline::executor {

enum class StepKind : std::uint8_t { send, recv, reduce, copy, pack, unpack, add };
enum class Buffer : std::uint8_t { input, output, scratch, wire };

constexpr std::size_t kBuffers = 4;

// Returns true for steps that convert a block between floats and the packed form in the wire buffer.
constexpr bool converts(StepKind kind) {
    return kind >= StepKind::pack;
}

// Returns true for steps that do not communicate.
constexpr bool is_local(StepKind kind) {
    return kind >= StepKind::copy;
}

// Blocks [first, first + length) of a buffer.
struct Slice {
    Buffer buffer = Buffer::output;
    std::uint32_t first = 0;
    std::uint32_t length = 0;
};

struct Step {
    StepKind kind = StepKind::send;
    bool final = false;  // for a reduction: the result contains the values of all ranks
    int peer = -1;       // group rank; -1 for a local step
    Slice dst;           // written by all steps except send; an add also reads it
    Slice src;           // read by all steps except recv; for a reduction, the local operand

    bool reads() const { return kind != StepKind::recv; }
    bool writes() const { return kind != StepKind::send; }
};

// An earlier step whose access to some blocks conflicts with that of a later step. The later step never overtakes it.
struct Dependency {
    std::uint32_t step;
    bool earlier_dst;  // the earlier step writes (rather than reads) the conflicting blocks
    bool later_dst;    // the later step writes (rather than reads) these blocks
};

// The steps that communicate with one peer, in the order in which both sides execute them.
struct Flow {
    int peer;
    std::vector<std::uint32_t> sends;
    std::vector<std::uint32_t> receives;
};

struct Schedule {
    // `flat` has nine numbers per step: `kind`, `final`, `peer`, the three numbers of `dst` (the buffer, the first
    // block and the number of blocks), and the same three numbers of `src`. Returns nullptr, with `bad_step` set to the
    // first invalid step, if the steps are not a valid schedule for rank `rank` of `size` ranks. `wire` is the format
    // of blocks in the wire buffer, if any.
    static std::shared_ptr<const Schedule> make(std::uint8_t algorithm, std::uint32_t blocks, int rank, int size,
                                                std::span<const std::int32_t> flat, std::size_t* bad_step = nullptr,
                                                WireType wire = WireType::none);

    std::span<const Dependency> dependencies(std::uint32_t step) const {
        return std::span(all_dependencies)
            .subspan(dependencies_from[step], dependencies_from[step + 1] - dependencies_from[step]);
    }

    std::uint8_t algorithm = 0;
    std::uint32_t blocks = 0;
    std::uint32_t scratch_blocks = 0;
    std::uint32_t wire_blocks = 0;
    WireType wire = WireType::none;
    int rank = 0;
    int size = 0;
    std::vector<Step> steps;
    std::vector<Flow> flows;
    std::vector<std::uint32_t> local;  // the steps that do not communicate
    std::vector<Dependency> all_dependencies;
    std::vector<std::uint32_t> dependencies_from;
};

}  // namespace paceline::executor
