// The progress of a simulated rank in its schedule. Implements the watermarks of executor/watermarks.cpp with
// fractional bytes.
//
// All blocks have the same length here, while the executor's blocks may differ by one element. A message without blocks
// counts as one byte, which represents its header.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "executor/schedule.hpp"

namespace paceline::simulate {

constexpr double kMinBytes = 1e-3;  // amounts below this number of bytes are rounding errors

struct SimulatedStep {
    double src_offset = 0;
    double dst_offset = 0;
    double nbytes = 0;
    double done = 0;
    bool is_finished = false;
};

class RankProgress {
  public:
    RankProgress(std::shared_ptr<const executor::Schedule> schedule, double block_nbytes);

    const executor::Schedule& schedule() const { return *schedule_; }
    const SimulatedStep& state(std::uint32_t step) const { return states_[step]; }
    bool is_over() const { return open_ == 0; }

    // Returns the watermark that the step may reach now, or nullopt if it may not advance at all.
    std::optional<double> limit(std::uint32_t step) const;

    // Returns the number of bytes, at most `max_rate`, that the steps in `numbers[at:]` may move now. `numbers` lists
    // the steps of one flow in order; counting stops at the first step that does not directly follow the previous one
    // in the schedule.
    double ahead(std::span<const std::uint32_t> numbers, std::size_t at, double max_rate) const;

    // Advances a step; returns true if the step is then finished.
    bool advance(std::uint32_t step, double nbytes);

    // Returns the later steps that this step's progress may allow to advance.
    std::span<const std::uint32_t> dependents(std::uint32_t step) const;

  private:
    struct Operand {
        double offset;
        double nbytes;
        double done;
        double scale;  // bytes in this buffer per byte of the step
    };

    void place_step(std::uint32_t step, double block_nbytes);
    void find_dependents();
    bool all_received_before(std::uint32_t step) const;
    Operand operand(std::uint32_t step, bool dst) const;

    std::shared_ptr<const executor::Schedule> schedule_;
    double packed_;  // packed bytes per byte of floats
    std::vector<SimulatedStep> states_;
    std::vector<std::uint32_t> dependents_;
    std::vector<std::uint32_t> dependents_from_;
    std::size_t open_;
};

}  // namespace paceline::simulate
