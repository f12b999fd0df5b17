#include "bindings/calls.hpp"

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

Call make_call(int operation, int dtype, int reduce_op, int root, std::uint64_t count, std::int64_t timeout_ns,
               const std::vector<FlatPieces>& inputs, const std::vector<FlatPieces>& outputs) {
    Call call;
    call.operation = static_cast<Operation>(operation);
    call.dtype = static_cast<DType>(dtype);
    call.reduce_op = static_cast<ReduceOp>(reduce_op);
    call.root = root;
    call.count = count;
    call.timeout_ns = timeout_ns;
    call.inputs = to_streams(inputs);
    call.outputs = to_streams(outputs);
    return call;
}

bool python_interrupted() {
    const nb::gil_scoped_acquire gil;
    return PyErr_Occurred() != nullptr || PyErr_CheckSignals() != 0;
}

nb::object report(Outcome outcome) {
    if (outcome.code == Code::ok) return nb::none();
    return nb::cast(std::move(outcome));
}

nb::object run_call(CallQueue& queue, Call call) {
    Outcome outcome;
    {
        const nb::gil_scoped_release release;
        outcome = queue.run(std::move(call), python_interrupted);
    }
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    return report(std::move(outcome));
}

std::chrono::steady_clock::time_point deadline_in(double timeout_s) {
    return std::chrono::steady_clock::now() +
           std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(timeout_s));
}

}  // namespace paceline::bindings
