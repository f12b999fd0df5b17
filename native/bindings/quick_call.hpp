// The fast path of a persistent call, which runs without a Python frame.
//
// A subclass in Python (paceline.comm.group.collectives.persistent) does everything else. If a check fails or a
// profiler is recording, the subclass's method `_call_with_care` is called instead, which repeats the checks; `_fail`
// receives the outcome of a failed call.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "bindings/prepared_call.hpp"
#include "bindings/tensors.hpp"

namespace paceline::bindings {

class QuickCall {
  public:
    // Before this, every call takes the path of `_call_with_care`. `tensors` has each tensor with its layout when the
    // call was prepared, as returned by `layout_of`. The time-out is the attribute `timeout_ns` of `limits`. In the
    // dictionary `watched`, the value of `key` is whether a profiler is recording. `count_writes` is called before each
    // call with `written`, the tensors that the call writes.
    void arm(nanobind::object prepared, std::vector<std::pair<nanobind::object, nanobind::object>> tensors,
             nanobind::object layout_of, nanobind::object limits, nanobind::dict watched, nanobind::str key,
             nanobind::object count_writes, nanobind::tuple written);

    // Makes the call of `self`, an object of the subclass; a slot of its type.
    static PyObject* call(PyObject* self, PyObject* arguments, PyObject* keywords);
    static int traverse(PyObject* self, visitproc visit, void* arg);
    static int clear(PyObject* self);

    bool is_started = false;  // whether `start` was called and the call is not complete

  private:
    struct Prepared {
        nanobind::object tensor;
        nanobind::object layout;           // in the form that Python compares
        std::optional<TensorLayout> read;  // the layout as read without Python, if this is supported
    };

    bool is_as_usual() const;
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
