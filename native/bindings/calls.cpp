#include "bindings/calls.hpp"

#include <optional>

namespace nb = nanobind;

namespace paceline::bindings {
namespace {

std::vector<Stream> to_streams(const std::vector<FlatPieces>& flat) {
    std::vector<Stream> streams;
    streams.reserve(flat.size());
    for (const FlatPieces& each : flat) streams.push_back(to_stream(each));
    return streams;
}

}  // namespace

Stream to_stream(const FlatPieces& flat) {
    std::vector<Piece> pieces;
    pieces.reserve(flat.size() / 2);
    for (std::size_t i = 0; i + 1 < flat.size(); i += 2)
        pieces.push_back({reinterpret_cast<std::uint8_t*>(flat[i]), static_cast<std::size_t>(flat[i + 1])});
    return Stream(std::move(pieces));
}

Call to_call(const nb::tuple& fields) {
    constexpr std::size_t kFields = 11;
    if (fields.size() != kFields) throw nb::type_error("a call is a paceline.engine.channel.Call");
    Call call;
    call.operation = static_cast<Operation>(nb::cast<int>(fields[0]));
    call.dtype = static_cast<DType>(nb::cast<int>(fields[1]));
    call.reduce_op = static_cast<ReduceOp>(nb::cast<int>(fields[2]));
    call.root = nb::cast<int>(fields[3]);
    call.count = nb::cast<std::uint64_t>(fields[4]);
    call.timeout_ns = nb::cast<std::int64_t>(fields[5]);
    call.inputs = to_streams(nb::cast<std::vector<FlatPieces>>(fields[6]));
    call.outputs = to_streams(nb::cast<std::vector<FlatPieces>>(fields[7]));
    if (const int wire = nb::cast<int>(fields[8]); wire != 0) {
        call.algorithm = static_cast<std::uint8_t>(kQuantised + wire);
        const auto residual = nb::cast<FlatPieces>(fields[9]);
        if (!residual.empty()) {
            call.residual = reinterpret_cast<float*>(residual.at(0));
            call.residual_count = residual.at(1) / sizeof(float);
        }
    }
    if (!fields[10].is_none()) call.update = nb::cast<std::shared_ptr<update::Update>>(fields[10]);
    return call;
}

bool python_interrupted() {
    const nb::gil_scoped_acquire gil;
    return PyErr_Occurred() != nullptr || PyErr_CheckSignals() != 0;
}

std::shared_ptr<CallQueue> usable(std::shared_ptr<CallQueue> queue) {
    if (!queue) throw nb::value_error("the group is closed");
    if (queue->is_inherited())
        throw nb::value_error(
            "this process was forked from a member of the group, and only that member can make the group's calls; "
            "start processes with multiprocessing's method 'spawn', and make a group in them");
    return queue;
}

bool is_small(const Call& call) {
    constexpr std::size_t kSmall = 4096;
    std::size_t nbytes = 0;
    for (const Stream& each : call.inputs) nbytes += each.nbytes();
    for (const Stream& each : call.outputs) nbytes += each.nbytes();
    return nbytes <= kSmall;
}

nb::object report(Outcome outcome) {
    if (outcome.code == Code::ok) return nb::none();
    return nb::cast(std::move(outcome));
}

nb::object run_call(CallQueue& queue, Call& call, bool may_be_over_at_once) {
    Outcome outcome;
    {
        std::optional<nb::gil_scoped_release> released;
        const std::function<void()> release = [&released] { released.emplace(); };
        call.before_waiting = &release;
        if (!may_be_over_at_once) will_wait(call);
        outcome = queue.run(call, python_interrupted);
        call.before_waiting = nullptr;
    }
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    return report(std::move(outcome));
}

void abort_calls(std::shared_ptr<CallQueue> queue) {
    const nb::gil_scoped_release release;
    if (queue) queue->abort();
    queue.reset();
}

int failure_of(std::shared_ptr<CallQueue> queue) {
    const nb::gil_scoped_release release;
    const Code code = queue ? queue->failure() : Code::ok;
    queue.reset();
    return static_cast<int>(code);
}

std::chrono::steady_clock::time_point deadline_in(double timeout_s) {
    return std::chrono::steady_clock::now() +
           std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(timeout_s));
}

}  // namespace paceline::bindings
