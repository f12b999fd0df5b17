// What the bindings of all channels share: tensors cross as address and number of bytes.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "call/call_queue.hpp"

namespace paceline::bindings {

// A tensor list: address, bytes, address, bytes, ...
using FlatPieces = std::vector<std::uint64_t>;

Stream to_stream(const FlatPieces& flat);

// The call that a paceline.engine.channel.Call describes, a tuple: operation, dtype, reduce op, root, count, time-out,
// inputs, outputs.
Call to_call(const nanobind::tuple& fields);

// Lets Ctrl-C through while a call waits; leaves the exception set on the calling thread.
bool python_interrupted();

// None when all went well.
nanobind::object report(Outcome outcome);

// Runs the call on this thread, without the interpreter lock.
nanobind::object run_call(CallQueue& queue, Call call);

std::chrono::steady_clock::time_point deadline_in(double timeout_s);

}  // namespace paceline::bindings
