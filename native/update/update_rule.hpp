// Elementwise optimizer rules, and the kernels that apply them.
//
// Results equal those of PyTorch's implementations up to rounding and are bitwise equal at all SIMD levels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "reduce/reduce.hpp"

namespace paceline::update {

enum class UpdateRule : std::uint8_t { adam, sgd };

// The options of a parameter group for one step, named as in PyTorch.
struct UpdateOptions {
    UpdateRule rule = UpdateRule::sgd;
    double lr = 0;
    double weight_decay = 0;
    bool maximize = false;
    // for Adam, and for AdamW (decoupled weight decay)
    double beta1 = 0;
    double beta2 = 0;
    double eps = 0;
    bool is_decoupled = false;
    // for SGD
    double momentum = 0;
    double dampening = 0;
    bool nesterov = false;
};

// Factors computed from the options and the step number.
struct UpdateFactors {
    double sign = 1;    // -1 if the objective is maximized, otherwise 1
    double l2 = 0;      // L2 penalty: multiple of the parameter to add to its gradient
    double shrink = 1;  // factor by which the parameter is multiplied (decoupled weight decay)
    double lr = 0;      // SGD's learning rate, or Adam's divided by the bias correction of its first average
    // Adam's first average or SGD's momentum: the factors for the old value and the gradient
    double first_kept = 0;
    double first_added = 0;
    bool nesterov = false;
    // Adam's average of squares: the factors for the old value and the squared gradient
    double second_kept = 0;
    double second_added = 0;
    double root_scale = 1;  // factor for the square root of the average of squares
    double eps = 0;
};

// Pointers to contiguous elements of each array. `first` and `second` are null if the rule has no such state.
struct UpdateElements {
    void* param;
    void* first;
    void* second;
    const void* gradient;
    std::size_t count;
};

using UpdateFn = void (*)(const UpdateElements& elements, const UpdateFactors& factors);

// Returns the factors for step number `step`, counted from 1.
UpdateFactors factors_of(const UpdateOptions& options, double step);

// Returns the fastest kernel that this machine can run; nullptr if the type is neither f32 nor f64.
UpdateFn find_update(DType dtype, UpdateRule rule);

}  // namespace paceline::update
