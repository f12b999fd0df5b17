#include "update/update.hpp"

#include <cmath>

#include "reduce/simd.hpp"

namespace paceline::update {

namespace baseline {
UpdateFn find(DType dtype, UpdateRule rule);
}
#if PACELINE_AVX
namespace avx2 {
UpdateFn find(DType dtype, UpdateRule rule);
}
namespace avx512 {
UpdateFn find(DType dtype, UpdateRule rule);
}
#endif

UpdateFn find_update(DType dtype, UpdateRule rule) {
#if PACELINE_AVX
    const SimdLevel level = best_simd();
    if (level == SimdLevel::avx512) return avx512::find(dtype, rule);
    if (level == SimdLevel::avx2) return avx2::find(dtype, rule);
#endif
    return baseline::find(dtype, rule);
}

UpdateFactors factors_of(const UpdateOptions& options, double step) {
    UpdateFactors factors;
    factors.sign = options.maximize ? -1 : 1;
    if (options.is_decoupled)
        factors.shrink = 1 - options.lr * options.weight_decay;
    else
        factors.l2 = options.weight_decay;
    factors.lr = options.lr;
    if (options.rule == UpdateRule::sgd) {
        factors.first_kept = options.momentum;
        factors.first_added = 1 - options.dampening;
        factors.nesterov = options.nesterov;
        return factors;
    }
    factors.lr /= 1 - std::pow(options.beta1, step);
    factors.first_kept = options.beta1;
    factors.first_added = 1 - options.beta1;
    factors.second_kept = options.beta2;
    factors.second_added = 1 - options.beta2;
    factors.root_scale = 1 / std::sqrt(1 - std::pow(options.beta2, step));
    factors.eps = options.eps;
    return factors;
}

void Update::begin(const std::vector<UpdateOptions>& groups) {
    at_ = within_ = 0;
    const ParameterRange* before = nullptr;
    for (std::size_t i = 0; i < runs_.size(); ++i) {
        ParameterRange& run = runs_[i];
        if (run.steps != nullptr) *run.steps += 1;
        const float step = run.steps != nullptr ? *run.steps : 0;
        // Reuses the previous run's factors if possible: computing powers is expensive, and most runs have the same
        // step count.
        const bool is_alike =
            before != nullptr && before->group == run.group && (before->steps != nullptr ? *before->steps : 0) == step;
        if (is_alike) {
            applied_[i] = applied_[i - 1];
        } else {
            const UpdateOptions& options = groups[run.group];
            applied_[i] = {find_update(dtype_, options.rule), factors_of(options, step)};
        }
        before = &run;
    }
}

void Update::apply(const std::uint8_t* averages, std::size_t nbytes) {
    const std::size_t item = item_size(dtype_);
    while (nbytes != 0 && at_ < runs_.size()) {
        const ParameterRange& run = runs_[at_];
        const std::size_t rest = run.nbytes - within_;
        const std::size_t n = rest < nbytes ? rest : nbytes;
        const auto from = [this](std::uint8_t* state) { return state == nullptr ? nullptr : state + within_; };
        const AppliedRule& applied = applied_[at_];
        applied.kernel({run.param + within_, from(run.first), from(run.second), averages, n / item}, applied.factors);
        averages += n;
        nbytes -= n;
        within_ += n;
        if (within_ == run.nbytes) {
            ++at_;
            within_ = 0;
        }
    }
}

}  // namespace paceline::update
