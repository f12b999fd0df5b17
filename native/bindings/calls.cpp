#include "bindings/calls.hpp"

#include <algorithm>
#include <optional>
#include <string>

#include "bindings/call_site.hpp"
#include "wire/wire.hpp"

namespace nb = nanobind;

namespace paceline::bindings {
namespace {

std::vector<ByteStream> to_streams(const std::vector<FlatRanges>& flat) {
    std::vector<ByteStream> streams;
    streams.reserve(flat.size());
    for (const FlatRanges& each : flat) streams.push_back(to_stream(each));
    return streams;
}

[[noreturn]] void refuse(const std::string& what) {
    throw nb::value_error(what.c_str());
}

template <class OutcomeCode>
OutcomeCode to_code(int code, OutcomeCode last, const char* what) {
    if (code < 0 || code > static_cast<int>(last))
        refuse("there is no " + std::string(what) + " " + std::to_string(code));
    return static_cast<OutcomeCode>(code);
}

bool reduces(Operation operation) {
    return operation == Operation::all_reduce || operation == Operation::reduce ||
           operation == Operation::reduce_scatter;
}

bool has_root(Operation operation) {
    return operation == Operation::broadcast || operation == Operation::reduce || operation == Operation::gather ||
           operation == Operation::scatter;
}

void require_streams(const std::vector<ByteStream>& streams, std::size_t count, std::optional<std::uint64_t> nbytes,
                     const char* what) {
    if (streams.size() != count)
        refuse("the call has " + std::to_string(streams.size()) + " " + what + "; it needs " + std::to_string(count));
    for (const ByteStream& each : streams)
        if (nbytes && each.nbytes() != *nbytes)
            refuse("one of the call's " + std::string(what) + " has " + std::to_string(each.nbytes()) +
                   " bytes; each needs " + std::to_string(*nbytes));
}

// Checks the number of tensors in a call on a group whose ranks are all on one host. For all operations except
// all_to_all, also checks that each tensor has `nbytes` bytes.
void require_tensors(const Call& call, bool is_root, std::size_t size, std::uint64_t nbytes) {
    std::size_t inputs = 0;
    std::size_t outputs = 1;
    switch (call.operation) {
        case Operation::all_reduce:
            inputs = call.inputs.empty() ? 0 : 1;
            break;
        case Operation::all_gather:
            inputs = 1;
            outputs = size;
            break;
        case Operation::gather:
            inputs = 1;
            outputs = is_root ? size : 0;
            break;
        case Operation::reduce_scatter:
            inputs = size;
            outputs = call.update && call.outputs.empty() ? 0 : 1;
            break;
        case Operation::scatter:
            inputs = is_root ? size : 0;
            break;
        case Operation::all_to_all:
            require_streams(call.inputs, size, std::nullopt, "inputs");
            require_streams(call.outputs, size, std::nullopt, "outputs");
            return;
        case Operation::none:
        case Operation::barrier:
            outputs = 0;
            break;
        case Operation::broadcast:
        case Operation::reduce:
            break;
    }
    require_streams(call.inputs, inputs, nbytes, "inputs");
    require_streams(call.outputs, outputs, nbytes, "outputs");
}

// The field names of CollectiveCall. Python compares interned strings by address.
struct InternedNames {
    PyObject* operation = PyUnicode_InternFromString("operation");
    PyObject* dtype = PyUnicode_InternFromString("dtype");
    PyObject* reduce_op = PyUnicode_InternFromString("reduce_op");
    PyObject* root = PyUnicode_InternFromString("root");
    PyObject* count = PyUnicode_InternFromString("count");
    PyObject* timeout_ns = PyUnicode_InternFromString("timeout_ns");
    PyObject* inputs = PyUnicode_InternFromString("inputs");
    PyObject* outputs = PyUnicode_InternFromString("outputs");
    PyObject* wire = PyUnicode_InternFromString("wire");
    PyObject* residual = PyUnicode_InternFromString("residual");
    PyObject* update = PyUnicode_InternFromString("update");
};

nb::object field(nb::handle fields, PyObject* name) {
    PyObject* const value = PyObject_GetAttr(fields.ptr(), name);
    if (value == nullptr) {
        PyErr_Clear();
        throw nb::type_error("a call is a paceline.comm.engine.channel.CollectiveCall");
    }
    return nb::steal(value);
}

}  // namespace

Operation to_operation(int code) {
    return to_code(code, Operation::barrier, "operation");
}

DType to_dtype(int code) {
    return to_code(code, DType::c32, "type of elements");
}

ReduceOp to_reduce_op(int code) {
    return to_code(code, ReduceOp::none, "reduction");
}

void require_valid(const Call& call, int rank, int size, bool is_exact) {
    if (has_root(call.operation) && (call.root < 0 || call.root >= size))
        refuse("the root is " + std::to_string(call.root) + "; the group has ranks 0 to " + std::to_string(size - 1));
    if (reduces(call.operation) && find_reduction(call.dtype, call.reduce_op) == nullptr)
        refuse("the reduction is not defined for the type");
    std::uint64_t nbytes = 0;
    std::uint64_t most = 0;
    for (const std::vector<ByteStream>* streams : {&call.inputs, &call.outputs})
        for (const ByteStream& each : *streams) most = std::max<std::uint64_t>(most, each.nbytes());
    if (__builtin_mul_overflow(call.count, item_size(call.dtype), &nbytes) || nbytes > most)
        refuse("the call has " + std::to_string(call.count) + " elements, and no tensor with room for them");
    if (is_exact) require_tensors(call, call.root == rank, static_cast<std::size_t>(size), nbytes);
}

ByteStream to_stream(const FlatRanges& flat) {
    std::vector<ByteRange> ranges;
    ranges.reserve(flat.size() / 2);
    std::uint64_t nbytes = 0;
    for (std::size_t i = 0; i + 1 < flat.size(); i += 2) {
        if (__builtin_add_overflow(nbytes, flat[i + 1], &nbytes))
            refuse("the tensors have more bytes than 64 bits say");
        ranges.push_back({reinterpret_cast<std::uint8_t*>(flat[i]), static_cast<std::size_t>(flat[i + 1])});
    }
    return ByteStream(std::move(ranges));
}

Call to_call(nb::handle fields) {
    static const InternedNames names;
    Call call;
    call.operation = to_operation(nb::cast<int>(field(fields, names.operation)));
    call.dtype = to_dtype(nb::cast<int>(field(fields, names.dtype)));
    call.reduce_op = to_reduce_op(nb::cast<int>(field(fields, names.reduce_op)));
    call.root = nb::cast<int>(field(fields, names.root));
    call.count = nb::cast<std::uint64_t>(field(fields, names.count));
    call.timeout_ns = nb::cast<std::int64_t>(field(fields, names.timeout_ns));
    call.inputs = to_streams(nb::cast<std::vector<FlatRanges>>(field(fields, names.inputs)));
    call.outputs = to_streams(nb::cast<std::vector<FlatRanges>>(field(fields, names.outputs)));
    if (const int wire = nb::cast<int>(field(fields, names.wire)); wire != 0) {
        if (wire < 0 || wire > static_cast<int>(WireType::int4)) refuse("there is no wire " + std::to_string(wire));
        call.algorithm = static_cast<std::uint8_t>(kQuantized + wire);
        const auto residual = nb::cast<FlatRanges>(field(fields, names.residual));
        if (!residual.empty()) {
            call.residual = reinterpret_cast<float*>(residual.at(0));
            call.residual_count = residual.at(1) / sizeof(float);
        }
    }
    if (const nb::object given = field(fields, names.update); !given.is_none()) {
        const auto update = nb::cast<std::shared_ptr<CheckedUpdate>>(given);
        update->require_step();
        call.update = update;
    }
    return call;
}

int index_among(const std::vector<int>& members, const shm::HostMesh& mesh) {
    std::vector<int> sorted = members;
    std::sort(sorted.begin(), sorted.end());
    if (sorted.empty() || sorted.front() < 0 || sorted.back() >= mesh.size() ||
        std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end())
        refuse("the members of a group are different ranks of the mesh, 0 to " + std::to_string(mesh.size() - 1));
    const auto mine = std::find(members.begin(), members.end(), mesh.rank());
    if (mine == members.end()) refuse("this rank is not one of the group's members");
    return static_cast<int>(mine - members.begin());
}

bool python_interrupted() {
    const nb::gil_scoped_acquire gil;
    return PyErr_Occurred() != nullptr || PyErr_CheckSignals() != 0;
}

std::shared_ptr<CallQueue> require_usable(std::shared_ptr<CallQueue> queue) {
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
    for (const ByteStream& each : call.inputs) nbytes += each.nbytes();
    for (const ByteStream& each : call.outputs) nbytes += each.nbytes();
    return nbytes <= kSmall;
}

nb::object to_python(Outcome outcome) {
    if (outcome.code == OutcomeCode::ok) return nb::none();
    return nb::cast(std::move(outcome));
}

nb::object run_call(CallQueue& queue, Call& call, bool may_complete_at_once) {
    Outcome outcome;
    note_call_site();
    {
        std::optional<nb::gil_scoped_release> released;
        const std::function<void()> release = [&released] { released.emplace(); };
        call.before_waiting = &release;
        if (!may_complete_at_once) notify_before_waiting(call);
        outcome = queue.run(call, python_interrupted);
        call.before_waiting = nullptr;
    }
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    return to_python(std::move(outcome));
}

std::shared_ptr<Work> submit_call(const std::shared_ptr<CallQueue>& queue, Call call) {
    note_call_site();
    const nb::gil_scoped_release release;
    return queue->submit(std::move(call));
}

void abort_calls(std::shared_ptr<CallQueue> queue) {
    const nb::gil_scoped_release release;
    if (queue) queue->abort();
    queue.reset();
}

int failure_of(std::shared_ptr<CallQueue> queue) {
    const nb::gil_scoped_release release;
    const OutcomeCode code = queue ? queue->failure() : OutcomeCode::ok;
    queue.reset();
    return static_cast<int>(code);
}

std::chrono::nanoseconds to_duration(double timeout_s) {
    constexpr double kMaxDurationS = 100 * 365.25 * 86'400;
    if (!(timeout_s > 0)) return {};
    const std::chrono::duration<double> timeout(std::min(timeout_s, kMaxDurationS));
    return std::chrono::duration_cast<std::chrono::nanoseconds>(timeout);
}

std::chrono::steady_clock::time_point deadline_in(double timeout_s) {
    return std::chrono::steady_clock::now() + to_duration(timeout_s);
}

}  // namespace paceline::bindings
