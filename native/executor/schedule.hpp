// What one rank does in a collective, as data: made by paceline.schedule, checked there, run by executor.hpp.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace paceline::executor {

enum class Kind : std::uint8_t { send, receive, reduce, copy };
enum class Buffer : std::uint8_t { input, output, scratch };

// Blocks [first, first + count) of a buffer.
struct Slice {
    Buffer buffer = Buffer::output;
    std::uint32_t first = 0;
    std::uint32_t count = 0;
};

struct Step {
    Kind kind = Kind::send;
    bool final = false;  // of a reduction: all ranks' values are in it now
    int peer = -1;       // group rank; -1 for a copy
    Slice to;            // written by receive, reduce and copy
    Slice from;          // read by send, reduce (the local operand) and copy
};

// An earlier step whose slice a step's slice meets: the later one follows it, byte by byte.
struct Dependency {
    std::uint32_t step;
    bool its_to;  // its slice is the written one
    bool my_to;   // this step's is
};

// A peer's steps in the order in which both sides take them.
struct Flow {
    int peer;
    std::vector<std::uint32_t> sends;
    std::vector<std::uint32_t> receives;
};

struct Schedule {
    // `flat` holds nine numbers a step: kind, final, peer, and buffer, first, count of `to` and of `from`.
    // nullptr when they are no schedule for `rank` of `size`; `bad_step` then says up to which step they are one.
    static std::shared_ptr<const Schedule> make(std::uint8_t algorithm, std::uint32_t blocks, int rank, int size,
                                                std::span<const std::int32_t> flat, std::size_t* bad_step = nullptr);

    std::span<const Dependency> dependencies(std::uint32_t step) const {
        return std::span(all_dependencies)
            .subspan(dependencies_from[step], dependencies_from[step + 1] - dependencies_from[step]);
    }

    std::uint8_t algorithm = 0;
    std::uint32_t blocks = 0;
    std::uint32_t scratch_blocks = 0;
    int rank = 0;
    int size = 0;
    std::vector<Step> steps;
    std::vector<Flow> flows;
    std::vector<std::uint32_t> copies;
    std::vector<Dependency> all_dependencies;
    std::vector<std::uint32_t> dependencies_from;
};

}  // namespace paceline::executor
