#include "bindings/call_site.hpp"

#include <nanobind/stl/string.h>

#include <string>
#include <unordered_map>
#include <utility>

#include "bindings/bindings.hpp"
#include "record/recorder.hpp"

namespace nb = nanobind;

namespace paceline::bindings {
namespace {

using record::Recorder;

constexpr int kMaxFrames = 64;
constexpr std::size_t kMaxCodes = 4096;
constexpr std::uint32_t kMaxLines = std::uint32_t{1} << record::kLineBits;

// The data recorded for a function or module: the number of its file name in the recording (0 if the file is not the
// user's), and the call site of each instruction that has made a call.
struct CodeLines {
    nb::object held;  // the code object, whose address must not be reused
    std::uint32_t file = 0;
    std::unordered_map<long, std::uint32_t> sites;
};

using Codes = std::unordered_map<PyObject*, CodeLines>;

// The code objects that have made calls recorded by `recorder`. These objects and the function below are never
// destroyed, because other threads may still make calls while the interpreter shuts down. The interpreter lock guards
// them.
struct KnownCodes {
    Recorder* recorder = nullptr;
    Codes codes;
};

KnownCodes& known_codes() {
    static KnownCodes& known = *new KnownCodes;
    return known;
}

nb::object& namer() {
    static nb::object& name_of = *new nb::object;
    return name_of;
}

nb::object attribute(PyObject* of, PyObject* name) {
    return nb::steal(PyObject_GetAttr(of, name));
}

std::uint32_t file_of(PyObject* code) {
    static PyObject* const filename = PyUnicode_InternFromString("co_filename");
    const nb::object name = namer()(attribute(code, filename));
    return name.is_none() ? 0 : Recorder::active()->name(nb::cast<std::string>(name));
}

CodeLines& known(PyObject* code) {
    auto& [recorder, codes] = known_codes();
    if (recorder == Recorder::active())
        if (const auto found = codes.find(code); found != codes.end()) return found->second;
    const std::uint32_t file = file_of(code);
    Codes dropped;  // freed after `codes` is valid again, since freeing a code object can run Python code
    if (recorder != Recorder::active() || codes.size() >= kMaxCodes) dropped.swap(codes);
    recorder = Recorder::active();
    return codes.try_emplace(code, CodeLines{nb::borrow(code), file, {}}).first->second;
}

std::uint32_t site_in(CodeLines& code, PyFrameObject* frame) {
    static PyObject* const lasti = PyUnicode_InternFromString("f_lasti");
    const nb::object instruction = attribute(reinterpret_cast<PyObject*>(frame), lasti);
    const auto [found, is_new] = code.sites.try_emplace(nb::cast<long>(instruction), 0);
    if (!is_new) return found->second;
    const int line = PyFrame_GetLineNumber(frame);
    if (line > 0 && static_cast<std::uint32_t>(line) < kMaxLines)
        found->second = code.file << record::kLineBits | static_cast<std::uint32_t>(line);
    return found->second;
}

std::uint32_t find_site() {
    static PyObject* const back = PyUnicode_InternFromString("f_back");
    nb::object frame = nb::steal(reinterpret_cast<PyObject*>(PyThreadState_GetFrame(PyThreadState_Get())));
    for (int depth = 0; depth < kMaxFrames && frame.is_valid() && !frame.is_none(); ++depth) {
        auto* const at = reinterpret_cast<PyFrameObject*>(frame.ptr());
        const nb::object code = nb::steal(reinterpret_cast<PyObject*>(PyFrame_GetCode(at)));
        if (CodeLines& own = known(code.ptr()); own.file != 0) return site_in(own, at);
        frame = attribute(frame.ptr(), back);
    }
    return 0;
}

}  // namespace

void note_call_site() {
    if (Recorder::active() == nullptr || !namer().is_valid()) return;
    record::set_next_site(find_site());
}

void set_user_file_namer(nb::object name_of) {
    namer() = std::move(name_of);
}

}  // namespace paceline::bindings
