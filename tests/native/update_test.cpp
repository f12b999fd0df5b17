// Tests that an update gives the same results whether it is applied in parts of odd sizes or all at once.
// test_shared_model_optimizer.py in tests/unit compares the results with those of PyTorch.
#include "update/update.hpp"

#include <cmath>
#include <utility>
#include <vector>

#include "check.hpp"

namespace paceline::update::baseline {
UpdateFn find(DType dtype, UpdateRule rule);
}

namespace {

using namespace paceline;
using namespace paceline::update;

// Three runs of parameters with Adam's state, and the concatenated gradients of all runs.
struct AdamParameters {
    static constexpr std::size_t kSizes[] = {1, 700, 37};
    static constexpr std::size_t kPadding = 9;

    std::vector<std::vector<float>> params, first, second;
    std::vector<float> steps{0, 0, 4}, gradients;

    AdamParameters() {
        for (const std::size_t size : kSizes) {
            params.emplace_back(size, 1.0F);
            first.emplace_back(size, 0.25F);
            second.emplace_back(size, 0.5F);
            for (std::size_t i = 0; i < size; ++i) gradients.push_back(std::sin(static_cast<float>(gradients.size())));
        }
        gradients.resize(gradients.size() + kPadding, 1.0F);
    }

    static std::uint8_t* bytes(std::vector<float>& values) { return reinterpret_cast<std::uint8_t*>(values.data()); }

    Update update() {
        std::vector<ParameterRange> runs;
        for (std::size_t i = 0; i < params.size(); ++i)
            runs.push_back({bytes(params[i]), bytes(first[i]), bytes(second[i]), &steps[i],
                            params[i].size() * sizeof(float), i / 2});
        return {DType::f32, std::move(runs)};
    }
};

std::vector<UpdateOptions> adam_of_two_groups() {
    UpdateOptions options;
    options.rule = UpdateRule::adam;
    options.lr = 0.1;
    options.beta1 = 0.9;
    options.beta2 = 0.99;
    options.eps = 1e-8;
    UpdateOptions other = options;
    other.lr = 0;
    return {options, other};
}

void parts_of_any_size_have_the_bits_of_the_whole() {
    AdamParameters whole;
    Update at_once = whole.update();
    at_once.begin(adam_of_two_groups());
    at_once.apply(AdamParameters::bytes(whole.gradients), whole.gradients.size() * sizeof(float));
    for (const std::size_t range : {1, 3, 64, 500}) {
        AdamParameters model;
        Update update = model.update();
        update.begin(adam_of_two_groups());
        for (std::size_t at = 0; at < model.gradients.size(); at += range) {
            const std::size_t rest = model.gradients.size() - at;
            update.apply(AdamParameters::bytes(model.gradients) + at * sizeof(float),
                         (rest < range ? rest : range) * sizeof(float));
        }
        CHECK(model.params == whole.params);
        CHECK(model.first == whole.first);
        CHECK(model.second == whole.second);
    }
}

void every_simd_level_rounds_alike() {
    for (const UpdateRule rule : {UpdateRule::adam, UpdateRule::sgd})
        for (const bool decoupled : {false, true}) {
            UpdateOptions options = adam_of_two_groups()[0];
            options.rule = rule;
            options.weight_decay = 0.3;
            options.is_decoupled = decoupled;
            options.momentum = 0.9;
            const UpdateFactors factors = factors_of(options, 3);
            AdamParameters mine, other;
            for (auto [model, kernel] :
                 {std::pair(&mine, find_update(DType::f32, rule)), std::pair(&other, baseline::find(DType::f32, rule))})
                kernel({model->params[1].data(), model->first[1].data(), model->second[1].data(),
                        model->gradients.data(), AdamParameters::kSizes[1]},
                       factors);
            CHECK(mine.params == other.params);
            CHECK(mine.first == other.first);
            CHECK(mine.second == other.second);
        }
}

void every_run_has_its_group_and_its_number_of_steps() {
    AdamParameters model;
    Update update = model.update();
    update.begin(adam_of_two_groups());
    update.apply(AdamParameters::bytes(model.gradients), model.gradients.size() * sizeof(float));
    CHECK(model.steps == (std::vector<float>{1, 1, 5}));
    CHECK(model.params[0][0] != 1.0F);
    CHECK(model.params[2][0] == 1.0F);  // unchanged, because its group's learning rate is 0
    CHECK(model.first[2][0] != 0.25F);
}

void other_types_have_no_kernels() {
    for (const UpdateRule rule : {UpdateRule::adam, UpdateRule::sgd}) {
        CHECK(find_update(DType::f64, rule) != nullptr);
        CHECK(find_update(DType::bf16, rule) == nullptr);
        CHECK(find_update(DType::i32, rule) == nullptr);
    }
}

}  // namespace

int main() {
    parts_of_any_size_have_the_bits_of_the_whole();
    every_simd_level_rounds_alike();
    every_run_has_its_group_and_its_number_of_steps();
    other_types_have_no_kernels();
}
