// What one rank does in a collective, as data: made and proved by paceline.schedule, executed by executor.hpp. The
// words are those of src/paceline/schedule/steps.py.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace paceline::executor {

enum class Kind : std::uint8_t { send, recv, reduce, copy };
enum class Buffer : std::uint8_t { input, output, scratch };

// Blocks [first, first + length) of a buffer.
struct Slice {
    Buffer buffer = Buffer::output;
    std::uint32_t first = 0;
    std::uint32_t length = 0;
};

struct Step {
    Kind kind = Kind::send;
    bool final = false;  // of a reduction: all ranks' values are in it now
    int peer = -1;       // group rank; -1 for a copy
    Slice dst;           // written by recv, reduce and copy
    Slice src;           // read by send, reduce (the local operand) and copy
};

// An earlier step that touches blocks of a later one in a conflicting way: the later step follows it, byte by byte.
struct Dependency {
    std::uint32_t step;
    bool earlier_dst;  // the conflict is with what the earlier step writes, not with what it reads
    bool later_dst;    // the later step writes these blocks, and does not read them
};

// The steps with one peer, in the order in which both sides execute them.
struct Flow {
    int peer;
    std::vector<std::uint32_t> sends;
    std::vector<std::uint32_t> receives;
};

struct Schedule {
    // `flat` holds nine numbers per step: kind, final, peer, and buffer, first, length of `dst` and of `src`.
    // Returns nullptr when they are not a schedule for `rank` of `size`; `bad_step` is then the first invalid step.
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
