// Bindings for the recorder, used by paceline.comm.record and paceline.operate.diagnosis. They have no effect while the
// recorder is off.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <bit>
#include <string>
#include <vector>

#include "bindings/bindings.hpp"
#include "bindings/call_site.hpp"
#include "record/recorder.hpp"
#include "record/snapshot.hpp"

namespace nb = nanobind;

namespace paceline::bindings {
namespace {

using record::CallFields;
using record::EventFields;
using record::Recorder;

// A call performed by an engine outside the C++ core.
class RecordedCall {
  public:
    RecordedCall(std::uint32_t group, int operation, int dtype, int reduce_op, std::uint64_t sequence,
                 std::uint64_t count, int root, bool is_async, std::int32_t tag) {
        Recorder* const recorder = Recorder::active();
        if (recorder == nullptr || group == 0) return;
        fields_.group = group;
        fields_.operation = static_cast<std::uint8_t>(operation);
        fields_.dtype = static_cast<std::uint8_t>(dtype);
        fields_.reduce_op = static_cast<std::uint8_t>(reduce_op);
        fields_.sequence = sequence;
        fields_.count = count;
        fields_.root = root;
        fields_.is_async = is_async;
        fields_.tag = tag;
        fields_.arrived = record::ticks();
        note_call_site();
        entry_ = recorder->add(fields_, false);
    }

    // Records that the call starts at `tick` or, if `tick` is 0, now.
    void start(std::uint64_t tick) {
        Recorder* const recorder = Recorder::active();
        if (recorder == nullptr) return;
        fields_.started = tick == 0 ? record::ticks() : std::max(tick, fields_.arrived);
        fields_.state = record::CallState::running;
        recorder->change(entry_, fields_, false);
    }

    // Records that the call ends at `tick` or, if `tick` is 0, now. `shm_nbytes` and `tcp_nbytes` count
    // the bytes that this rank sent. For a receive, `last_arrived` is the sender.
    void end(int outcome, std::uint64_t shm_nbytes, std::uint64_t tcp_nbytes, int last_arrived, std::uint64_t tick) {
        Recorder* const recorder = Recorder::active();
        if (recorder == nullptr) return;
        if (fields_.started == 0) fields_.started = fields_.arrived;
        fields_.ended = tick == 0 ? record::ticks() : std::max(tick, fields_.started);
        fields_.state = outcome == 0 ? record::CallState::done : record::CallState::failed;
        fields_.outcome = static_cast<std::uint8_t>(outcome);
        fields_.shm_nbytes = shm_nbytes;
        fields_.tcp_nbytes = tcp_nbytes;
        fields_.last_arrived = last_arrived;
        recorder->change(entry_, fields_, true);
    }

  private:
    CallFields fields_;
    record::CallEntryHandle entry_;
};

bool begin(int fd, const std::string& worker, const std::string& host, const std::string& boot,
           std::uint64_t time_namespace) {
    return Recorder::begin(fd, {worker, host, boot, time_namespace});
}

std::uint32_t open_group(const std::string& name, const std::string& engine, std::uint64_t identity, int rank,
                         const std::vector<int>& members) {
    Recorder* const recorder = Recorder::active();
    return recorder == nullptr ? 0 : recorder->open_group(name, engine, identity, rank, members);
}

std::uint64_t begin_event(std::uint32_t kind, std::uint32_t name, std::int64_t first, std::int64_t second) {
    Recorder* const recorder = Recorder::active();
    if (recorder == nullptr) return 0;
    return recorder->add(EventFields{kind, name, record::ticks(), 0, first, second, 0, 0, 0}, false).stamp;
}

std::uint64_t begin_event_at(std::uint32_t kind, std::uint32_t name, std::int64_t first, std::int64_t second,
                             std::uint64_t tick) {
    Recorder* const recorder = Recorder::active();
    if (recorder == nullptr) return 0;
    return recorder->add(EventFields{kind, name, tick, 0, first, second, 0, 0, 0}, false).stamp;
}

void mark(std::uint32_t kind, std::uint32_t name, std::int64_t first, std::int64_t second) {
    Recorder* const recorder = Recorder::active();
    if (recorder == nullptr) return;
    const std::uint64_t now = record::ticks();
    recorder->add(EventFields{kind, name, now, now, first, second, 0, 0, 0}, true);
}

void add_span(std::uint32_t kind, std::uint32_t name, std::uint64_t start, std::int64_t first, std::int64_t second) {
    Recorder* const recorder = Recorder::active();
    if (recorder == nullptr) return;
    recorder->add(EventFields{kind, name, start, record::ticks(), first, second, 0, 0, 0}, true);
}

// Calls a member function of the recorder, or does nothing if the recorder is off.
template <auto member, class... Arguments>
void if_active(Arguments... arguments) {
    if (Recorder* const recorder = Recorder::active(); recorder != nullptr) (recorder->*member)(arguments...);
}

nb::bytes snapshot(int fd) {
    std::vector<std::uint8_t> copied;
    {
        const nb::gil_scoped_release release;
        copied = record::snapshot(fd);
    }
    return nb::bytes(copied.data(), copied.size());
}

}  // namespace

void register_record(nb::module_& module) {
    nb::class_<RecordedCall>(module, "RecordedCall")
        .def(nb::init<std::uint32_t, int, int, int, std::uint64_t, std::uint64_t, int, bool, std::int32_t>())
        .def("start", &RecordedCall::start, nb::arg("tick") = 0)
        .def("end", &RecordedCall::end, nb::arg("outcome"), nb::arg("shm_nbytes") = 0, nb::arg("tcp_nbytes") = 0,
             nb::arg("last_arrived") = -1, nb::arg("tick") = 0);

    module.def("begin_recording", &begin, nb::arg("fd"), nb::arg("worker"), nb::arg("host"), nb::arg("boot"),
               nb::arg("time_namespace"));
    module.def("is_recording", [] { return Recorder::active() != nullptr; });
    module.def("pause_recording", &Recorder::pause);
    module.def("identify_recording",
               [](int rank, int world_size) { if_active<&Recorder::identify>(rank, world_size); });
    module.def("finish_recording", [] { if_active<&Recorder::finish>(); });
    module.def("record_name", [](const std::string& text) {
        Recorder* const recorder = Recorder::active();
        return recorder == nullptr ? 0 : recorder->name(text);
    });
    module.def("set_user_file_namer", &set_user_file_namer, nb::arg("name_of"));
    module.def("record_step", [](std::uint64_t step) { if_active<&Recorder::set_step>(step); });
    module.def("record_group", &open_group);
    module.def("record_group_closed", [](std::uint32_t serial) { if_active<&Recorder::close_group>(serial); });
    module.def("record_begin", &begin_event);
    module.def("record_end", [](std::uint64_t stamp) {
        if (Recorder* const recorder = Recorder::active(); recorder != nullptr) recorder->end_event(stamp);
    });
    module.def("record_begin_at", &begin_event_at);
    module.def("record_end_at",
               [](std::uint64_t stamp, std::uint64_t tick) { if_active<&Recorder::end_event_at>(stamp, tick); });
    module.def("record_end_with", [](std::uint64_t stamp, std::int64_t first, std::int64_t second) {
        if (Recorder* const recorder = Recorder::active(); recorder != nullptr)
            recorder->end_event(stamp, first, second);
    });
    module.def("record_sent", [](std::uint64_t stamp) { if_active<&Recorder::event_sent>(stamp); });
    module.def("record_mark", &mark);
    module.def("record_span", &add_span);
    module.def("record_value", [](std::uint32_t name, double value) {
        mark(record::kValue, name, std::bit_cast<std::int64_t>(value), 0);
    });
    module.def("record_ticks", [] { return record::ticks(); });
    module.def("record_tick_at", [](std::int64_t monotonic_ns) {
        Recorder* const recorder = Recorder::active();
        return recorder == nullptr ? 0 : recorder->tick_at(monotonic_ns);
    });
    module.def("snapshot_recording", &snapshot);
    module.attr("RECORDING_NBYTES") = record::kBytes;
}

}  // namespace paceline::bindings
