// Functions shared by the bindings of all channels. Tensors are passed as an address and a number of bytes.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "call/call_queue.hpp"

namespace paceline::bindings {

// A list of tensors as address, bytes, address, bytes, ...
using FlatPieces = std::vector<std::uint64_t>;

Stream to_stream(const FlatPieces& flat);

// Converts a paceline.engine.channel.Call, a tuple: operation, dtype, reduce op, root, count, time-out,
// inputs, outputs, wire, residual, update.
Call to_call(const nanobind::tuple& fields);

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

std::chrono::steady_clock::time_point deadline_in(double timeout_s);

}  // namespace paceline::bindings
