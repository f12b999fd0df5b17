#include "bindings/prepared_call.hpp"

#include "bindings/bindings.hpp"

namespace nb = nanobind;

namespace paceline::bindings {

std::shared_ptr<CallQueue> PreparedCall::begin(std::int64_t timeout_ns) {
    std::shared_ptr<CallQueue> queue = require_usable(queue_.lock());
    if (is_running_) throw nb::value_error("another thread is making this call");
    for (ByteStream& each : call_.inputs) each.rewind();
    for (ByteStream& each : call_.outputs) each.rewind();
    call_.timeout_ns = timeout_ns;
    call_.metrics = {};
    if (complete_) complete_(call_);
    return queue;
}

nb::object PreparedCall::run(std::int64_t timeout_ns) {
    const std::shared_ptr<CallQueue> queue = begin(timeout_ns);
    const struct Running {
        explicit Running(bool& is_running) : flag(is_running) { flag = true; }
        ~Running() { flag = false; }
        bool& flag;
    } running(is_running_);
    return run_call(*queue, call_, may_complete_at_once_);
}

std::shared_ptr<Work> PreparedCall::submit(std::int64_t timeout_ns) {
    const std::shared_ptr<CallQueue> queue = begin(timeout_ns);
    return submit_call(queue, call_);
}

void register_prepared_calls(nb::module_& module) {
    nb::class_<PreparedCall>(module, "PreparedCall")
        .def("run", &PreparedCall::run)
        .def("submit", &PreparedCall::submit);
}

}  // namespace paceline::bindings
