// Functions shared by the bindings of all channels. Each tensor is passed as an address and a number of bytes.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "call/call_queue.hpp"
#include "shm/host_mesh.hpp"

namespace paceline::bindings {

// A list of tensors: address, number of bytes, address, number of bytes, ...
using FlatRanges = std::vector<std::uint64_t>;

// Throws nb::value_error if the total number of bytes overflows 64 bits.
ByteStream to_stream(const FlatRanges& flat);

// These functions convert Python's codes to enumerators; they throw nb::value_error for an unknown code.
Operation to_operation(int code);
DType to_dtype(int code);
ReduceOp to_reduce_op(int code);

// Throws nb::value_error if the reduction is not defined for the dtype, the root is not one of the `size` ranks, or the
// tensors are too small for the elements. If `is_exact` is true (for groups on one host), also checks that `rank`
// passed exactly the tensors that the operation requires.
void require_valid(const Call& call, int rank, int size, bool is_exact);

// An optimizer update. Python calls `begin_step` before each step.
class CheckedUpdate final : public update::Update {
  public:
    CheckedUpdate(DType dtype, const std::vector<update::ParameterRange>& runs);

    // Begins a step. Throws nb::value_error if a run's group has no options or a run lacks optimizer state that the
    // update rule requires.
    void begin_step(const std::vector<update::UpdateOptions>& groups);

    // Throws nb::value_error if no step has begun.
    void require_step() const;

  private:
    std::vector<update::ParameterRange> runs_;
    bool has_begun_ = false;
};

// Converts a paceline.comm.engine.channel.CollectiveCall. Throws nb::type_error if the object lacks one of its fields.
Call to_call(nanobind::handle fields);

// Returns this process's index in `members`. Throws nb::value_error unless the members are distinct ranks in the mesh
// and include this process.
int index_among(const std::vector<int>& members, const shm::HostMesh& mesh);

// Handles pending signals, so that Ctrl-C interrupts a blocked call. Returns true if a signal handler raised an
// exception, and leaves this exception set on the calling thread.
bool python_interrupted();

// Returns the group's queue. Throws nb::value_error if the group is closed or was inherited through a fork.
std::shared_ptr<CallQueue> require_usable(std::shared_ptr<CallQueue> queue);

// Returns true if releasing the interpreter lock would take longer than copying and reducing the tensors.
bool is_small(const Call& call);

// Converts an outcome for Python; returns None if the call succeeded.
nanobind::object to_python(Outcome outcome);

// Runs the call on this thread. Releases the interpreter lock immediately or, if `may_complete_at_once` is set, only
// when the thread has to wait.
nanobind::object run_call(CallQueue& queue, Call& call, bool may_complete_at_once = false);

// Queues the call after earlier calls.
std::shared_ptr<Work> submit_call(const std::shared_ptr<CallQueue>& queue, Call call);

// These functions have no effect if the queue's group has been closed.
void abort_calls(std::shared_ptr<CallQueue> queue);
int failure_of(std::shared_ptr<CallQueue> queue);

// Converts a timeout in seconds. Negative numbers and NaN become 0, and the result is limited to a hundred years.
std::chrono::nanoseconds to_duration(double timeout_s);

std::chrono::steady_clock::time_point deadline_in(double timeout_s);

}  // namespace paceline::bindings
