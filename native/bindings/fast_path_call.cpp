#include "bindings/fast_path_call.hpp"

#include <nanobind/stl/pair.h>

#include <algorithm>

#include "bindings/bindings.hpp"
#include "bindings/tensors.hpp"

namespace nb = nanobind;

namespace paceline::bindings {
namespace {

// Returns the text as an interned string, which is never freed.
PyObject* name(const char* text) {
    return PyUnicode_InternFromString(text);
}

PyObject* call_slow_path(PyObject* self) {
    static PyObject* const method = name("_call_slow_path");
    return PyObject_CallMethodObjArgs(self, method, nullptr);
}

}  // namespace

void FastPathCall::arm(nb::object prepared, std::vector<std::pair<nb::object, nb::object>> tensors,
                       nb::object layout_of, nb::object limits, nb::dict watched, nb::str key, nb::object count_writes,
                       nb::tuple written) {
    if (!nb::isinstance<PreparedCall>(prepared)) throw nb::type_error("a persistent call needs a PreparedCall");
    call_ = nb::cast<PreparedCall*>(prepared);
    prepared_ = std::move(prepared);
    for (auto& [tensor, layout] : tensors) tensors_.push_back({tensor, layout, read_layout(tensor)});
    layout_of_ = std::move(layout_of);
    limits_ = std::move(limits);
    watched_ = std::move(watched);
    key_ = std::move(key);
    count_writes_ = std::move(count_writes);
    written_ = std::move(written);
}

bool FastPathCall::can_use_fast_path() const {
    if (call_ == nullptr || is_started) return false;
    if (PyDict_GetItemWithError(watched_.ptr(), key_.ptr()) != Py_False) return false;
    return std::all_of(tensors_.begin(), tensors_.end(), [this](const Prepared& each) { return has_its_layout(each); });
}

bool FastPathCall::has_its_layout(const Prepared& prepared) const {
    if (prepared.read) return has_layout(prepared.tensor, *prepared.read);
    return layout_of_(prepared.tensor).equal(prepared.layout);
}

PyObject* FastPathCall::call(PyObject* self, PyObject* arguments, PyObject* keywords) {
    static PyObject* const timeout_ns = name("timeout_ns");
    static PyObject* const fail = name("_fail");
    if (PyTuple_Size(arguments) != 0 || (keywords != nullptr && PyDict_Size(keywords) != 0)) {
        PyErr_SetString(PyExc_TypeError, "a persistent call takes no arguments; they were given when it was prepared");
        return nullptr;
    }
    const FastPathCall& fast = *nb::inst_ptr<FastPathCall>(self);
    try {
        if (!fast.can_use_fast_path()) {
            PyErr_Clear();
            return call_slow_path(self);
        }
        const nb::object limit = nb::steal(PyObject_GetAttr(fast.limits_.ptr(), timeout_ns));
        if (!limit.is_valid()) return nullptr;
        fast.count_writes_(fast.written_);
        const nb::object outcome = fast.call_->run(nb::cast<std::int64_t>(limit));
        return outcome.is_none() ? outcome.inc_ref().ptr()
                                 : PyObject_CallMethodObjArgs(self, fail, outcome.ptr(), nullptr);
    } catch (nb::python_error& error) {
        error.restore();
        return nullptr;
    } catch (const std::exception&) {  // the group is closed, or another thread is running the call
        return call_slow_path(self);
    }
}

int FastPathCall::traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (!nb::inst_ready(self)) return 0;
    const FastPathCall& fast = *nb::inst_ptr<FastPathCall>(self);
    Py_VISIT(fast.prepared_.ptr());
    Py_VISIT(fast.limits_.ptr());
    Py_VISIT(fast.watched_.ptr());
    Py_VISIT(fast.written_.ptr());
    Py_VISIT(fast.layout_of_.ptr());
    for (const Prepared& each : fast.tensors_) {
        Py_VISIT(each.tensor.ptr());
        Py_VISIT(each.layout.ptr());
    }
    return 0;
}

int FastPathCall::clear(PyObject* self) {
    FastPathCall& fast = *nb::inst_ptr<FastPathCall>(self);
    fast.call_ = nullptr;
    const auto dropped = std::pair(std::move(fast.tensors_), std::move(fast.prepared_));
    fast.tensors_.clear();
    fast.layout_of_.reset();
    fast.limits_.reset();
    fast.watched_.reset();
    fast.written_.reset();
    fast.count_writes_.reset();
    return 0;
}

void register_fast_path_calls(nb::module_& module) {
    static PyType_Slot slots[] = {{Py_tp_call, reinterpret_cast<void*>(&FastPathCall::call)},
                                  {Py_tp_traverse, reinterpret_cast<void*>(&FastPathCall::traverse)},
                                  {Py_tp_clear, reinterpret_cast<void*>(&FastPathCall::clear)},
                                  {0, nullptr}};
    nb::class_<FastPathCall>(module, "FastPathCall", nb::type_slots(slots))
        .def(nb::init<>())
        .def("arm", &FastPathCall::arm)
        .def_rw("is_started", &FastPathCall::is_started);
}

}  // namespace paceline::bindings
