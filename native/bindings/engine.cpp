// Bindings for the mesh, host groups and shared tensors, used by paceline.comm.engine.
#include <fcntl.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <tuple>

#include "bindings/bindings.hpp"
#include "bindings/calls.hpp"
#include "bindings/prepared_call.hpp"
#include "bindings/tensors.hpp"
#include "call/completion_counter.hpp"
#include "host/group.hpp"
#include "host/tensor_regions.hpp"
#include "reduce/finite.hpp"
#include "reduce/simd.hpp"
#include "shm/rank_set.hpp"

namespace nb = nanobind;

namespace paceline::bindings {
namespace {

class HostGroup {
  public:
    HostGroup(std::shared_ptr<shm::HostMesh> mesh, std::unique_ptr<host::Group> group, int rank, int size,
              std::size_t slot_bytes)
        : mesh_(std::move(mesh)),
          // The mesh must outlive a call that is still running on another thread.
          queue_(new CallQueue(std::move(group)), [held = mesh_](CallQueue* queue) { delete queue; }),
          rank_(rank),
          size_(size),
          slot_bytes_(slot_bytes) {}

    HostGroup(const HostGroup&) = delete;
    HostGroup& operator=(const HostGroup&) = delete;
    // The group's locks may be held by threads that exist only in the parent, so a forked child cannot destroy the
    // group.
    ~HostGroup() {
        if (is_forked_from_member()) static_cast<void>(new std::shared_ptr<CallQueue>(queue_));
    }

    nb::object all_reduce(std::uint64_t address, std::uint64_t count, int dtype, int reduce_op,
                          std::int64_t timeout_ns) {
        const DType type = to_dtype(dtype);
        const ReduceOp op = to_reduce_op(reduce_op);
        if (find_reduction(type, op) == nullptr) throw nb::value_error("the reduction is not defined for the type");
        return reduce({address, count, type}, op, timeout_ns);
    }

    // Returns False without reducing anything if the tensor or the reduction requires the general path.
    nb::object all_reduce_tensor(nb::handle tensor, nb::handle reduction, std::int64_t timeout_ns) {
        const auto reduce_op = read_reduction(reduction);
        const auto dense = reduce_op && queue_ ? read_dense(tensor) : std::nullopt;
        if (!dense || *reduce_op == ReduceOp::premul_sum || find_reduction(dense->dtype, *reduce_op) == nullptr)
            return nb::bool_(false);
        count_write(tensor);
        return reduce(*dense, *reduce_op, timeout_ns);
    }

    nb::object broadcast(std::uint64_t address, std::uint64_t count, int dtype, int root, std::int64_t timeout_ns) {
        Call call = on_one_tensor(Operation::broadcast, {address, count, to_dtype(dtype)}, timeout_ns);
        call.root = root;
        return finish(sound(call));
    }

    // Runs a call on dense inputs and outputs with `count` elements each; `inputs` and `outputs` are addresses.
    nb::object run_equal(int operation, int dtype, int reduce_op, int root, std::uint64_t count,
                         std::int64_t timeout_ns, const std::vector<std::uint64_t>& inputs,
                         const std::vector<std::uint64_t>& outputs) {
        Call call;
        call.operation = to_operation(operation);
        call.dtype = to_dtype(dtype);
        call.reduce_op = to_reduce_op(reduce_op);
        call.root = root;
        call.count = call.operation == Operation::all_to_all ? 0 : count;
        call.timeout_ns = timeout_ns;
        const std::size_t nbytes = nbytes_of(count, call.dtype);
        call.inputs = dense(inputs, nbytes);
        call.outputs = dense(outputs, nbytes);
        return finish(sound(call));
    }

    nb::object run(nb::handle fields) {
        Call call = to_call(fields);
        return finish(sound(call));
    }

    std::shared_ptr<Work> submit(nb::handle fields) {
        Call call = to_call(fields);
        find_region(sound(call));
        return submit_call(queue(), std::move(call));
    }

    PreparedCall* prepare(nb::handle fields) const {
        Call call = to_call(fields);
        sound(call);
        if (!may_be_shared(call)) return new PreparedCall(queue(), std::move(call), true);
        const auto find = [mesh = std::weak_ptr(mesh_)](Call& again) {
            again.region = 0;
            if (const auto held = mesh.lock()) host::locate_tensor(again, held);
        };
        return new PreparedCall(queue(), std::move(call), true, find);
    }

    void close() {
        const std::shared_ptr<CallQueue> ending = std::move(queue_);
        const nb::gil_scoped_release release;
        if (ending) ending->close();
    }

    void record_as(std::uint32_t group) const { queue()->record_as(group); }
    void abort() const { abort_calls(queue_); }
    int failure() const { return failure_of(queue_); }

  private:
    std::shared_ptr<CallQueue> queue() const { return require_usable(queue_); }

    // Returns the call after checking its arguments.
    Call& sound(Call& call) const {
        require_valid(call, rank_, size_, true);
        return call;
    }

    // Returns true if the group can reduce the call's tensor in place, provided that the tensor is in a shared region.
    bool may_be_shared(const Call& call) const {
        return call.operation == Operation::all_reduce && call.inputs.empty() && call.outputs[0].nbytes() > slot_bytes_;
    }

    void find_region(Call& call) const {
        if (may_be_shared(call)) host::locate_tensor(call, mesh_);
    }

    nb::object reduce(const DenseTensor& tensor, ReduceOp reduce_op, std::int64_t timeout_ns) {
        Call call = on_one_tensor(Operation::all_reduce, tensor, timeout_ns);
        call.reduce_op = reduce_op;
        return finish(call);
    }

    static Call on_one_tensor(Operation operation, const DenseTensor& tensor, std::int64_t timeout_ns) {
        Call call;
        call.operation = operation;
        call.dtype = tensor.dtype;
        call.count = tensor.count;
        call.timeout_ns = timeout_ns;
        const ByteRange whole{reinterpret_cast<std::uint8_t*>(tensor.address), nbytes_of(tensor.count, tensor.dtype)};
        call.outputs.emplace_back(std::vector<ByteRange>{whole});
        return call;
    }

    static std::size_t nbytes_of(std::uint64_t count, DType dtype) {
        std::size_t nbytes = 0;
        if (__builtin_mul_overflow(count, item_size(dtype), &nbytes))
            throw nb::value_error("the call has more elements than memory can hold");
        return nbytes;
    }

    static std::vector<ByteStream> dense(const std::vector<std::uint64_t>& addresses, std::size_t nbytes) {
        std::vector<ByteStream> streams;
        streams.reserve(addresses.size());
        for (const std::uint64_t address : addresses)
            streams.emplace_back(std::vector<ByteRange>{{reinterpret_cast<std::uint8_t*>(address), nbytes}});
        return streams;
    }

    nb::object finish(Call& call) {
        find_region(call);
        return run_call(*queue(), call, is_small(call));
    }

    std::shared_ptr<shm::HostMesh> mesh_;
    std::shared_ptr<CallQueue> queue_;
    int rank_;
    int size_;
    std::size_t slot_bytes_;
};

constexpr int kMaxThreads = 1 << 16;
constexpr std::size_t kMinSlotBytes = 4 << 10;
constexpr std::size_t kMaxSlotBytes = std::size_t{1} << 30;

HostGroup* create_host_group(std::shared_ptr<shm::HostMesh> mesh, std::vector<int> members, std::uint64_t id,
                             std::size_t slot_bytes, double timeout_s, int threads) {
    if (slot_bytes < kMinSlotBytes || slot_bytes > kMaxSlotBytes || slot_bytes % kMinSlotBytes != 0)
        throw nb::value_error("a slot has a multiple of 4 KiB, up to 1 GiB");
    if (threads < 1 || threads > kMaxThreads) throw nb::value_error("a rank computes on 1 to 65536 threads");
    const int rank = index_among(members, *mesh);
    const int size = static_cast<int>(members.size());
    const auto deadline = deadline_in(timeout_s);
    std::unique_ptr<host::Group> group;
    {
        const nb::gil_scoped_release release;
        group = host::Group::create(*mesh, std::move(members), id, slot_bytes, deadline, threads);
    }
    return group ? new HostGroup(std::move(mesh), std::move(group), rank, size, slot_bytes) : nullptr;
}

void require_ranks(int size) {
    if (size < 1 || size > shm::kMaxRanks) throw nb::value_error("a host has 1 to 1024 ranks");
}

// Creates the directory for a host with `size` ranks. Returns the directory's descriptor, which the caller must close.
int create_directory(int size) {
    require_ranks(size);
    const auto directory = shm::HostDirectory::create(size);
    const int fd = directory ? fcntl(directory->descriptor(), F_DUPFD_CLOEXEC, 0) : -1;
    if (fd < 0) throw std::system_error(errno, std::generic_category(), "memfd_create");
    return fd;
}

// Joins the mesh whose directory has the descriptor `fd`, and takes ownership of `fd`. Creates a directory if `fd` is
// negative.
std::shared_ptr<shm::HostMesh> join_mesh(int rank, int size, int fd, std::vector<int> global_ranks) {
    require_ranks(size);
    if (rank < 0 || rank >= size) throw nb::value_error("the rank is not one of the directory's");
    if (!global_ranks.empty() && global_ranks.size() != static_cast<std::size_t>(size))
        throw nb::value_error("each rank of the directory needs a global rank");
    errno = EBADMSG;  // reported if the file is not a host directory
    auto directory = fd < 0 ? shm::HostDirectory::create(size) : shm::HostDirectory::adopt(fd, size);
    if (!directory) throw std::system_error(errno, std::generic_category(), "the directory of the host's ranks");
    directory->close_descriptor();
    return std::make_shared<shm::HostMesh>(rank, std::move(directory), std::move(global_ranks));
}

std::vector<int> lost(const shm::HostMesh& mesh) {
    std::vector<int> ranks;
    for (int r = 0; r < mesh.size(); ++r)
        if (mesh.has_died(r)) ranks.push_back(r);
    return ranks;
}

nb::object wait(const Work& work, std::int64_t timeout_ns) {
    constexpr std::int64_t kCheckNs = 100'000'000;
    while (!work.done()) {
        if (timeout_ns <= 0) return nb::bool_(false);
        const std::int64_t slice = timeout_ns < kCheckNs ? timeout_ns : kCheckNs;
        {
            const nb::gil_scoped_release release;
            work.wait(slice);
        }
        timeout_ns -= slice;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
    return nb::bool_(true);
}

std::vector<std::tuple<std::uint64_t, int, int, int, int, std::uint64_t>> calls_of(const Outcome& outcome) {
    std::vector<std::tuple<std::uint64_t, int, int, int, int, std::uint64_t>> calls;
    for (const CallHeader& header : outcome.calls)
        calls.emplace_back(header.sequence, static_cast<int>(header.operation), static_cast<int>(header.dtype),
                           static_cast<int>(header.reduce_op), header.root, header.count);
    return calls;
}

// Returns the algorithm number of each call in the outcome. The number is 0 for calls without a schedule.
std::vector<int> algorithms_of(const Outcome& outcome) {
    std::vector<int> algorithms;
    for (const CallHeader& header : outcome.calls) algorithms.push_back(header.algorithm);
    return algorithms;
}

// Creates a one-dimensional uint8 tensor in its own shared memory.
nb::ndarray<nb::pytorch, std::uint8_t, nb::ndim<1>> shared_tensor(std::size_t nbytes) {
    using Owner = std::shared_ptr<shm::Segment>;
    auto owner = std::make_unique<Owner>(host::create_region(nbytes));
    if (!*owner && (errno == EMFILE || errno == ENFILE))
        throw std::system_error(errno, std::generic_category(), "memfd_create");
    if (!*owner) throw std::bad_alloc();
    std::uint8_t* const data = (*owner)->data();
    const nb::capsule capsule(owner.release(), [](void* held) noexcept {
        const std::unique_ptr<Owner> segment(static_cast<Owner*>(held));
        host::unregister_region(**segment);
    });
    return nb::ndarray<nb::pytorch, std::uint8_t, nb::ndim<1>>(data, {nbytes}, capsule);
}

// Reduces the `count` elements at each address in `sources` into `out`, which may be one of the sources.
void reduce(std::uintptr_t out, const std::vector<std::uintptr_t>& sources, std::size_t count, int dtype, int reduce_op,
            int divisor) {
    const ReduceFn kernel = find_reduction(to_dtype(dtype), to_reduce_op(reduce_op));
    if (kernel == nullptr) throw nb::value_error("this reduction is not defined for the type");
    if (sources.empty() || divisor == 0)
        throw nb::value_error("a reduction needs sources, and a divisor that is not 0");
    std::vector<const void*> from;
    for (const std::uintptr_t source : sources) from.push_back(reinterpret_cast<const void*>(source));
    const nb::gil_scoped_release release;
    kernel(reinterpret_cast<void*>(out), from.data(), static_cast<int>(from.size()), count, divisor);
}

// Returns the index of the first range with NaN or infinity in its first `max_bytes` bytes, or -1 if there is none.
int first_not_finite(const FlatRanges& ranges, int dtype, std::size_t max_bytes) {
    const DType type = to_dtype(dtype);
    const nb::gil_scoped_release release;
    for (std::size_t i = 0; i + 1 < ranges.size(); i += 2) {
        const std::size_t nbytes = std::min(static_cast<std::size_t>(ranges[i + 1]), max_bytes);
        if (!are_finite(reinterpret_cast<const void*>(ranges[i]), nbytes, type)) return static_cast<int>(i / 2);
    }
    return -1;
}

}  // namespace

void register_engine(nb::module_& module) {
    nb::class_<Outcome>(module, "Outcome")
        .def_prop_ro("code", [](const Outcome& outcome) { return static_cast<int>(outcome.code); })
        .def_ro("missing", &Outcome::missing)
        .def_ro("has_begun", &Outcome::has_begun)
        .def_ro("waiting", &Outcome::waiting)
        .def_ro("blocked_by", &Outcome::blocked_by)
        .def_ro("gone", &Outcome::gone)
        .def_ro("left", &Outcome::left)
        .def_prop_ro("cause", [](const Outcome& outcome) { return outcome.cause.rank; })
        .def_prop_ro("cause_left", [](const Outcome& outcome) { return outcome.cause.left; })
        .def_prop_ro("cause_hung", [](const Outcome& outcome) { return outcome.cause.hung; })
        .def_ro("reporter", &Outcome::reporter)
        .def_ro("waited_ns", &Outcome::waited_ns)
        .def_ro("split_from", &Outcome::split_from)
        .def_ro("split_to", &Outcome::split_to)
        .def_ro("split_sent", &Outcome::split_sent)
        .def_ro("split_expected", &Outcome::split_expected)
        .def_ro("step", &Outcome::step)
        .def_prop_ro("calls", &calls_of)
        .def_prop_ro("algorithms", &algorithms_of);

    nb::class_<Work>(module, "Work")
        .def("done", &Work::done)
        .def("wait", &wait, nb::arg("timeout_ns"))
        .def("outcome", [](const Work& work) { return to_python(work.outcome()); });

    module.def("completion_count", [] { return CompletionCounter::of_process().count(); });
    module.def("announce_completion", [] { CompletionCounter::of_process().announce(); });
    module.def(
        "await_completion",
        [](std::uint32_t seen, std::int64_t timeout_ns) { CompletionCounter::of_process().await(seen, timeout_ns); },
        nb::arg("seen"), nb::arg("timeout_ns"), nb::call_guard<nb::gil_scoped_release>());

    nb::class_<shm::HostMesh>(module, "HostMesh")
        .def_static("join", &join_mesh, nb::arg("rank"), nb::arg("size"), nb::arg("directory") = -1,
                    nb::arg("global_ranks") = std::vector<int>{}, nb::call_guard<nb::gil_scoped_release>())
        .def("lost", &lost)
        .def(
            "absent",
            [](const shm::HostMesh& mesh, double timeout_s) {
                return mesh.directory().absent(
                    std::chrono::duration_cast<std::chrono::milliseconds>(to_duration(timeout_s)));
            },
            nb::arg("timeout_s"), nb::call_guard<nb::gil_scoped_release>())
        .def("close", &shm::HostMesh::close, nb::call_guard<nb::gil_scoped_release>());
    module.def("create_directory", &create_directory, nb::arg("size"));

    nb::class_<HostGroup>(module, "HostGroup")
        .def_static("create", &create_host_group, nb::arg("mesh"), nb::arg("members"), nb::arg("id"),
                    nb::arg("slot_bytes"), nb::arg("timeout_s"), nb::arg("threads"), nb::rv_policy::take_ownership)
        .def("all_reduce", &HostGroup::all_reduce)
        .def("all_reduce_tensor", &HostGroup::all_reduce_tensor)
        .def("broadcast", &HostGroup::broadcast)
        .def("run_equal", &HostGroup::run_equal)
        .def("run", &HostGroup::run)
        .def("submit", &HostGroup::submit)
        .def("prepare", &HostGroup::prepare, nb::rv_policy::take_ownership)
        .def("record_as", &HostGroup::record_as)
        .def("abort", &HostGroup::abort)
        .def("failure", &HostGroup::failure)
        .def("close", &HostGroup::close)
        // The `wire` argument has no effect on one host: data is never quantized there.
        .def_prop_ro("quantizes", [](const HostGroup&) { return true; });

    module.def("shared_tensor", &shared_tensor, nb::arg("nbytes"));
    module.def("simd_level", [] { return name_of(best_simd()); });
    module.def("reduce", &reduce, nb::arg("out"), nb::arg("sources"), nb::arg("count"), nb::arg("dtype"),
               nb::arg("reduce_op"), nb::arg("divisor"));
    module.def("first_not_finite", &first_not_finite, nb::arg("ranges"), nb::arg("dtype"), nb::arg("max_bytes"));
    module.def("reduces", [](int dtype, int reduce_op) {
        return find_reduction(to_dtype(dtype), to_reduce_op(reduce_op)) != nullptr;
    });
}

}  // namespace paceline::bindings
