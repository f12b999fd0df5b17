// Bindings for the optimizers that the core applies to averaged gradients.
#include "update/update.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <tuple>

#include "bindings/bindings.hpp"
#include "bindings/calls.hpp"

namespace nb = nanobind;

namespace paceline::bindings {
namespace {

using update::ParameterRange;
using update::Update;
using update::UpdateOptions;

// One run: the addresses of its elements, its two states and its step count, followed by its number of bytes and its
// group.
using RunFields = std::tuple<std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uintptr_t, std::size_t, std::size_t>;

template <class T>
T* at(std::uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

std::shared_ptr<CheckedUpdate> make_update(int dtype, const std::vector<RunFields>& fields) {
    const DType type = to_dtype(dtype);
    if (update::find_update(type, update::UpdateRule::sgd) == nullptr)
        throw nb::value_error("the core updates only float32 and float64");
    std::vector<ParameterRange> runs;
    for (const auto& [param, first, second, steps, nbytes, group] : fields)
        runs.push_back({at<std::uint8_t>(param), at<std::uint8_t>(first), at<std::uint8_t>(second), at<float>(steps),
                        nbytes, group});
    return std::make_shared<CheckedUpdate>(type, runs);
}

UpdateOptions adam_options(double lr, double weight_decay, bool maximize, double beta1, double beta2, double eps,
                           bool is_decoupled) {
    UpdateOptions options;
    options.rule = update::UpdateRule::adam;
    options.lr = lr;
    options.weight_decay = weight_decay;
    options.maximize = maximize;
    options.beta1 = beta1;
    options.beta2 = beta2;
    options.eps = eps;
    options.is_decoupled = is_decoupled;
    return options;
}

UpdateOptions sgd_options(double lr, double weight_decay, bool maximize, double momentum, double dampening,
                          bool nesterov) {
    UpdateOptions options;
    options.rule = update::UpdateRule::sgd;
    options.lr = lr;
    options.weight_decay = weight_decay;
    options.maximize = maximize;
    options.momentum = momentum;
    options.dampening = dampening;
    options.nesterov = nesterov;
    return options;
}

void apply_update(CheckedUpdate& update, std::uintptr_t averages, std::size_t nbytes) {
    update.require_step();
    update.apply(at<const std::uint8_t>(averages), nbytes);
}

}  // namespace

CheckedUpdate::CheckedUpdate(DType dtype, const std::vector<ParameterRange>& runs) : Update(dtype, runs), runs_(runs) {}

void CheckedUpdate::begin_step(const std::vector<UpdateOptions>& groups) {
    const auto can_begin = [&groups](const ParameterRange& run) {
        if (run.group >= groups.size() || run.param == nullptr) return false;
        const UpdateOptions& options = groups[run.group];
        if (options.rule == update::UpdateRule::sgd) return options.momentum == 0 || run.first != nullptr;
        return run.first != nullptr && run.second != nullptr && run.steps != nullptr;
    };
    has_begun_ = std::all_of(runs_.begin(), runs_.end(), can_begin);
    if (!has_begun_) throw nb::value_error("a run of the update has no options, or lacks states that its rule needs");
    begin(groups);
}

void CheckedUpdate::require_step() const {
    if (!has_begun_) throw nb::value_error("the update has not begun a step");
}

void register_updates(nb::module_& module) {
    nb::class_<UpdateOptions>(module, "UpdateOptions");
    module.def("adam_options", &adam_options, nb::kw_only(), nb::arg("lr"), nb::arg("weight_decay"),
               nb::arg("maximize"), nb::arg("beta1"), nb::arg("beta2"), nb::arg("eps"), nb::arg("is_decoupled"));
    module.def("sgd_options", &sgd_options, nb::kw_only(), nb::arg("lr"), nb::arg("weight_decay"), nb::arg("maximize"),
               nb::arg("momentum"), nb::arg("dampening"), nb::arg("nesterov"));
    nb::class_<CheckedUpdate>(module, "Update")
        .def(nb::new_(&make_update), nb::arg("dtype"), nb::arg("runs"))
        .def("begin", &CheckedUpdate::begin_step, nb::arg("groups"))
        .def("apply", &apply_update, nb::arg("averages"), nb::arg("nbytes"), nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace paceline::bindings
