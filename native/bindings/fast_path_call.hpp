// A fast path for persistent calls that runs without a Python frame.
//
// The Python subclass (paceline.comm.group.collectives.persistent) implements the slow path: its method
// `_call_slow_path` runs instead if a check fails or a profiler is recording, and `_fail` receives the outcome of a
// failed call.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "bindings/prepared_call.hpp"
#include "bindings/tensors.hpp"

namespace paceline::bindings {

class FastPathCall {
  public:
    // Enables the fast path; until then every call runs `_call_slow_path`. `tensors` lists each tensor with the layout
    // that `layout_of` returned during preparation. `limits.timeout_ns` is the timeout. `watched[key]` is False unless
    // a profiler is recording. `count_writes(written)` runs before each call; `written` holds the tensors that the call
    // writes.
    void arm(nanobind::object prepared, std::vector<std::pair<nanobind::object, nanobind::object>> tensors,
             nanobind::object layout_of, nanobind::object limits, nanobind::dict watched, nanobind::str key,
             nanobind::object count_writes, nanobind::tuple written);

    // Implements `tp_call` for the Python subclass; `self` is an instance of that subclass.
    static PyObject* call(PyObject* self, PyObject* arguments, PyObject* keywords);
    static int traverse(PyObject* self, visitproc visit, void* arg);
    static int clear(PyObject* self);

    bool is_started = false;  // true from `start` until the call is complete

  private:
    struct Prepared {
        nanobind::object tensor;
        nanobind::object layout;           // the value returned by `layout_of`
        std::optional<TensorLayout> read;  // the layout read without Python, if supported
    };

    bool can_use_fast_path() const;
    bool has_its_layout(const Prepared& prepared) const;

    PreparedCall* call_ = nullptr;
    nanobind::object prepared_;  // owns `call_`
    std::vector<Prepared> tensors_;
    nanobind::object layout_of_;
    nanobind::object limits_;
    nanobind::dict watched_;
    nanobind::str key_;
    nanobind::object count_writes_;
    nanobind::tuple written_;
};

}  // namespace paceline::bindings
