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

constexpr double kSliver = 1e-3;  // amounts below this number of bytes are rounding errors

struct StepState {
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
    const StepState& state(std::uint32_t step) const { return states_[step]; }
    bool is_over() const { return open_ == 0; }

    // Returns the watermark that the step may reach now, or nullopt if it may not advance at all.
    std::optional<double> limit(std::uint32_t step) const;

    // Returns the number of bytes, at most `most`, that the steps in `numbers[at:]` may move now. `numbers` lists the
    // steps of one flow in order; counting stops at the first step that does not directly follow the previous one in
    // the schedule.
    double ahead(std::span<const std::uint32_t> numbers, std::size_t at, double most) const;

    // Advances a step; returns true if the step is then finished.
    bool advance(std::uint32_t step, double nbytes);

    // Returns the later steps that this step's progress may enable to advance.
    std::span<const std::uint32_t> followers(std::uint32_t step) const;

  private:
    struct Side {
        double offset;
        double nbytes;
        double done;
        double scale;  // bytes in this buffer per byte of the step
    };

    void place(std::uint32_t step, double block_nbytes);
    void find_followers();
    bool all_received_before(std::uint32_t step) const;
    Side side(std::uint32_t step, bool dst) const;

    std::shared_ptr<const executor::Schedule> schedule_;
    double packed_;  // packed bytes per byte of floats
    std::vector<StepState> states_;
    std::vector<std::uint32_t> followers_;
    std::vector<std::uint32_t> followers_from_;
    std::size_t open_;
};

}  // namespace paceline::simulate
