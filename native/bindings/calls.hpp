// Functions shared by the bindings of all channels. Tensors are passed as an address and a number of bytes.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "call/call_queue.hpp"
#include "shm/mesh.hpp"

namespace paceline::bindings {

// A list of tensors: address, number of bytes, address, number of bytes, ...
using FlatPieces = std::vector<std::uint64_t>;

// Throws nb::value_error if the total number of bytes overflows 64 bits.
Stream to_stream(const FlatPieces& flat);

// Convert Python's codes to enumerators; throw nb::value_error for an unknown code.
Operation to_operation(int code);
DType to_dtype(int code);
ReduceOp to_reduce_op(int code);

// Throws nb::value_error unless the call has a reduction that is defined for its type (if it reduces), a root among the
// `size` ranks (if it has a root), and tensors with room for all of its elements. If `is_exact`, as on one host, the
// number and lengths of the tensors must also be those that the operation requires on `rank`.
void require_sound(const Call& call, int rank, int size, bool is_exact);

// An update whose steps are begun by Python.
class CheckedUpdate final : public update::Update {
  public:
    CheckedUpdate(DType dtype, const std::vector<update::Run>& runs);

    // Begins a step. Throws nb::value_error if a run's group has no options, or a run lacks a state that its rule
    // needs.
    void begin_step(const std::vector<update::Options>& groups);

    // Throws nb::value_error if no step has begun.
    void require_step() const;

  private:
    std::vector<update::Run> runs_;
    bool has_begun_ = false;
};

// Converts a paceline.comm.engine.channel.CollectiveCall, whose fields are read by name. Throws nb::type_error for an
// object that lacks one of the fields.
Call to_call(nanobind::handle fields);

// Returns this process's index in `members`. Throws nb::value_error unless the members are distinct ranks of the mesh
// and include this process.
int place_among(const std::vector<int>& members, const shm::Mesh& mesh);

// Handles pending signals, so that Ctrl-C interrupts a waiting call; leaves the exception set on the calling thread.
bool python_interrupted();

// Returns the queue of a group if it accepts calls. Throws nb::value_error if the group is closed, or if this process
// inherited it by a fork.
std::shared_ptr<CallQueue> usable(std::shared_ptr<CallQueue> queue);

// Whether the tensors are so small that releasing the interpreter lock would take longer than copying and reducing
// them.
bool is_small(const Call& call);

// Returns None if the call succeeded.
nanobind::object report(Outcome outcome);

// Runs the call on this thread without holding the interpreter lock. If `may_be_over_at_once`, the lock is not released
// until the thread has to wait.
nanobind::object run_call(CallQueue& queue, Call& call, bool may_be_over_at_once = false);

// These functions have no effect if the group of the queue has been closed.
void abort_calls(std::shared_ptr<CallQueue> queue);
int failure_of(std::shared_ptr<CallQueue> queue);

// Converts a time-out in seconds: 0 for a negative number or NaN, and at most a hundred years.
std::chrono::nanoseconds to_duration(double timeout_s);

std::chrono::steady_clock::time_point deadline_in(double timeout_s);

}  // namespace paceline::bindings
