// Rules of optimizers that update each element independently, and the kernels that apply them.
//
// Results equal those of torch's own implementations up to rounding, and are bitwise equal at every SIMD level.
#pragma once

#include <cstddef>
#include <cstdint>

#include "reduce/reduce.hpp"

namespace paceline::update {

enum class Rule : std::uint8_t { adam, sgd };

// The options that the parameters of a group share in a step; the names are those of torch's options.
struct Options {
    Rule rule = Rule::sgd;
    double lr = 0;
    double weight_decay = 0;
    bool maximize = false;
    // Adam, and AdamW if weight decay is decoupled
    double beta1 = 0;
    double beta2 = 0;
    double eps = 0;
    bool is_decoupled = false;
    // SGD
    double momentum = 0;
    double dampening = 0;
    bool nesterov = false;
};

// The factors that result from the options and the number of the step.
struct Factors {
    double sign = 1;    // the sign of gradients
    double l2 = 0;      // the factor of the parameter that is added to its gradient
    double shrink = 1;  // the factor of the parameter itself
    double lr = 0;      // SGD's learning rate, or Adam's divided by the bias correction of its first average
    // The first average, or the momentum: the share of it that is kept, and the share of the gradient that is added
    double first_kept = 0;
    double first_added = 0;
    bool nesterov = false;
    // Adam's average of squares
    double second_kept = 0;
    double second_added = 0;
    double root_scale = 1;  // the factor of its root
    double eps = 0;
};

// Contiguous elements of each array; `first` and `second` are null if the rule has no such state.
struct Elements {
    void* param;
    void* first;
    void* second;
    const void* gradient;
    std::size_t count;
};

using UpdateFn = void (*)(const Elements& elements, const Factors& factors);

// Returns the factors of the `step`-th step.
Factors factors_of(const Options& options, double step);

// Returns the fastest kernel that this machine can run; nullptr if the type is neither f32 nor f64.
UpdateFn find_update(DType dtype, Rule rule);

}  // namespace paceline::update
