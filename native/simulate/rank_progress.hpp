// The progress of a simulated rank in its schedule: the watermarks of executor/progress.cpp, in fractional bytes.
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

constexpr double kSliver = 1e-3;  // bytes that result only from rounding

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

    // Returns how many bytes, up to `most`, the steps in `numbers` from index `at` on may move now. `numbers` has the
    // steps of one flow in order; only steps that directly follow one another in the schedule count.
    double ahead(std::span<const std::uint32_t> numbers, std::size_t at, double most) const;

    // Advances a step; returns whether this finished it.
    bool advance(std::uint32_t step, double nbytes);

    // Returns the later steps that may be able to advance after this step's progress.
    std::span<const std::uint32_t> followers(std::uint32_t step) const;

  private:
    struct Side {
        double offset;
        double nbytes;
        double done;
        double scale;  // the bytes in this buffer per byte of the step
    };

    void place(std::uint32_t step, double block_nbytes);
    void find_followers();
    bool all_received_before(std::uint32_t step) const;
    Side side(std::uint32_t step, bool dst) const;

    std::shared_ptr<const executor::Schedule> schedule_;
    double packed_;  // the bytes on the wire per byte of floats
    std::vector<StepState> states_;
    std::vector<std::uint32_t> followers_;
    std::vector<std::uint32_t> followers_from_;
    std::size_t open_;
};

}  // namespace paceline::simulate
