// What a persistent call does each time that it is called, without a frame of Python's.
//
// A subclass in Python (paceline.group.persistent) does all the rest. Whenever something is not as it should be, or
// somebody wants to watch, its method `_call_with_care` is called instead, which looks again; `_fail` gets the outcome
// of a call that failed.
#pragma once

#include <utility>
#include <vector>

#include "bindings/prepared_call.hpp"

namespace paceline::bindings {

class QuickCall {
  public:
    // A tensor, and where it was when the call was prepared.
    using Place = std::pair<nanobind::object, std::uint64_t>;

    // Until it is armed, every call is made with care. The time-out is the attribute `timeout_ns` of `limits`.
    // `watched` is a dictionary in which `key` stands for whether somebody watches.
    // `count_writes` is called with `written`, the tensors that the call writes to, before each call.
    void arm(nanobind::object prepared, std::vector<Place> places, nanobind::object limits, nanobind::dict watched,
             nanobind::str key, nanobind::object count_writes, nanobind::tuple written);

    // Makes the call of the subclass's object `self`; a slot of its type.
    static PyObject* call(PyObject* self, PyObject* arguments, PyObject* keywords);
    static int traverse(PyObject* self, visitproc visit, void* arg);
    static int clear(PyObject* self);

    bool is_started = false;  // by `start`, and not over yet

  private:
    bool is_as_usual() const;

    PreparedCall* call_ = nullptr;
    nanobind::object prepared_;  // owns `call_`
    std::vector<Place> places_;
    nanobind::object limits_;
    nanobind::dict watched_;
    nanobind::str key_;
    nanobind::object count_writes_;
    nanobind::tuple written_;
};

}  // namespace paceline::bindings
