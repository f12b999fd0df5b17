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

// A list of tensors as address, bytes, address, bytes, ...
using FlatPieces = std::vector<std::uint64_t>;

// Throws nb::value_error if the tensors have more bytes than a number can say.
Stream to_stream(const FlatPieces& flat);

// Convert the numbers by which Python names these; throw nb::value_error if there is none of that number.
Operation to_operation(int code);
DType to_dtype(int code);
ReduceOp to_reduce_op(int code);

// Throws nb::value_error unless the call has a reduction that is defined for its type, if it needs one, a root that is
// one of `size` ranks, if it needs one, and tensors for all of its elements. Where each must have its own tensors, as
// on one host, they must also be as many and as long as the operation asks of `rank`.
void require_sound(const Call& call, int rank, int size, bool is_exact);

// An update whose steps Python begins.
class CheckedUpdate final : public update::Update {
  public:
    CheckedUpdate(DType dtype, const std::vector<update::Run>& runs);

    // Begins a step. Throws nb::value_error if a run's group has no options, or a run lacks what its rule needs.
    void begin_step(const std::vector<update::Options>& groups);

    // Throws nb::value_error if no step has begun.
    void require_step() const;

  private:
    std::vector<update::Run> runs_;
    bool has_begun_ = false;
};

// Converts a paceline.comm.engine.channel.CollectiveCall, whose fields are read by their names. Throws nb::type_error
// for an object that lacks one of them.
Call to_call(nanobind::handle fields);

// Returns this process's place among members of a mesh. Throws nb::value_error unless they are different ranks of it,
// of which this process is one.
int place_among(const std::vector<int>& members, const shm::Mesh& mesh);

// Lets Ctrl-C interrupt a waiting call; leaves the exception set on the calling thread.
bool python_interrupted();

// Returns the queue of a group if calls can be made on it. Throws nb::value_error if the group is closed, or if this
// process inherited it by a fork.
std::shared_ptr<CallQueue> usable(std::shared_ptr<CallQueue> queue);

// Whether the tensors are so small that to give up the interpreter lock would take longer than to copy and reduce them.
bool is_small(const Call& call);

// Returns None when the call succeeded.
nanobind::object report(Outcome outcome);

// Runs the call on this thread without holding the interpreter lock. If it `may_be_over_at_once`, the lock is not given
// up before the thread has to wait.
nanobind::object run_call(CallQueue& queue, Call& call, bool may_be_over_at_once = false);

// Both take the queue of a group that may have been closed, and then have no effect.
void abort_calls(std::shared_ptr<CallQueue> queue);
int failure_of(std::shared_ptr<CallQueue> queue);

// The time-out in seconds: none for one that is negative or no number, and a hundred years for one that is longer.
std::chrono::nanoseconds to_duration(double timeout_s);

std::chrono::steady_clock::time_point deadline_in(double timeout_s);

}  // namespace paceline::bindings
