// How far a simulated rank is in its schedule: the watermarks of executor/progress.cpp, in bytes that may be fractions.
//
// All blocks are equally long here, which the executor's are but for one element. A message of no blocks counts as one
// byte, which stands for its header.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "executor/schedule.hpp"

namespace paceline::simulate {

constexpr double kSliver = 1e-3;  // bytes that are only there because of rounding

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

    // The watermark that the step may reach now; nullopt when it may not go on at all.
    std::optional<double> limit(std::uint32_t step) const;

    // How many bytes, up to `most`, the steps of `numbers` from the one at `at` on may move now. They are those of one
    // flow in their order, and only those count that follow one another directly in the schedule.
    double ahead(std::span<const std::uint32_t> numbers, std::size_t at, double most) const;

    // Moves a step on; returns whether that finished it.
    bool advance(std::uint32_t step, double nbytes);

    // The later steps that the step's progress may let go on.
    std::span<const std::uint32_t> followers(std::uint32_t step) const;

  private:
    struct Side {
        double offset;
        double nbytes;
        double done;
        double scale;  // bytes in this buffer for a byte of the step
    };

    void place(std::uint32_t step, double block_nbytes);
    void find_followers();
    bool all_received_before(std::uint32_t step) const;
    Side side(std::uint32_t step, bool dst) const;

    std::shared_ptr<const executor::Schedule> schedule_;
    double packed_;  // bytes on the wire for a byte of floats
    std::vector<StepState> states_;
    std::vector<std::uint32_t> followers_;
    std::vector<std::uint32_t> followers_from_;
    std::size_t open_;
};

}  // namespace paceline::simulate
