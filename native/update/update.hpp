// An optimizer step, applied to averaged gradients while they are in the cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "update/update_rule.hpp"

namespace paceline::update {

// A range of a parameter with its state. `steps` points to the parameter's step count, or is null if the rule does not
// need it.
struct ParameterRange {
    std::uint8_t* param;
    std::uint8_t* first;
    std::uint8_t* second;
    float* steps;
    std::size_t nbytes;
    std::size_t group;
};

// Updates runs from front to back as their averages arrive.
class Update {
  public:
    // `dtype` must be supported by `find_update`.
    Update(DType dtype, std::vector<ParameterRange> runs)
        : dtype_(dtype), runs_(std::move(runs)), applied_(runs_.size()) {}

    // Begins a step. `groups` contains the options for each group of runs. Runs must have the states that their group's
    // rule requires (SGD with momentum, Adam).
    void begin(const std::vector<UpdateOptions>& groups);

    // Updates the next elements with their averaged gradients. Bytes after the last run are padding.
    void apply(const std::uint8_t* averages, std::size_t nbytes);

  private:
    struct AppliedRule {
        UpdateFn kernel = nullptr;
        UpdateFactors factors;
    };

    DType dtype_;
    std::vector<ParameterRange> runs_;
    std::vector<AppliedRule> applied_;  // the kernel and factors of each run
    std::size_t at_ = 0;                // index of the run that is updated next
    std::size_t within_ = 0;            // number of bytes of this run that have been updated
};

}  // namespace paceline::update
