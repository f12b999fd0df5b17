// Bindings for groups that run schedules over lanes and for messages between ranks, used by paceline.comm.engine.
#include <algorithm>
#include <chrono>
#include <iterator>
#include <optional>

#include "bindings/bindings.hpp"
#include "bindings/call_site.hpp"
#include "bindings/calls.hpp"
#include "bindings/prepared_call.hpp"
#include "bindings/tls.hpp"
#include "executor/executor.hpp"

namespace nb = nanobind;

namespace paceline::bindings {
namespace {

using executor::Messenger;
using executor::Request;
using executor::Schedule;

// A send or a receive in progress. It does not keep its group alive: closing the group fails all messages.
class Message {
  public:
    Message(const std::shared_ptr<Messenger>& messenger, std::shared_ptr<Request> request)
        : messenger_(messenger), request_(std::move(request)) {}

    bool done() const { return request_->done(); }
    int source() const { return request_->source(); }
    nb::object outcome() const { return to_python(request_->outcome()); }

    bool wait(std::int64_t timeout_ns) const {
        bool done = request_->done();
        if (const std::shared_ptr<Messenger> messenger = messenger_.lock(); messenger && !done) {
            const nb::gil_scoped_release release;
            done = messenger->wait(request_, timeout_ns, python_interrupted);
        }
        if (PyErr_Occurred() != nullptr) throw nb::python_error();
        return done;
    }

  private:
    std::weak_ptr<Messenger> messenger_;
    std::shared_ptr<Request> request_;
};

// A messenger and its lanes. The lanes must outlive the messenger. (If a deleter held the lanes, the messages' weak
// pointers would keep the lanes alive.)
struct MessengerWithLanes {
    explicit MessengerWithLanes(std::shared_ptr<link::LaneSet> held) : lanes(std::move(held)), messenger(*lanes) {}

    std::shared_ptr<link::LaneSet> lanes;
    Messenger messenger;
};

std::shared_ptr<Messenger> messenger_of(std::shared_ptr<link::LaneSet> lanes) {
    const auto owner = std::make_shared<MessengerWithLanes>(std::move(lanes));
    return {owner, &owner->messenger};
}

class ScheduleGroup {
  public:
    explicit ScheduleGroup(std::shared_ptr<link::LaneSet> lanes)
        : lanes_(std::move(lanes)),
          messenger_(messenger_of(lanes_)),
          // The lanes and the messenger must outlive a call that is still running on another thread.
          queue_(new CallQueue(std::make_unique<executor::Executor>(*lanes_, *messenger_)),
                 [lanes = lanes_, messenger = messenger_](CallQueue* queue) { delete queue; }) {}

    ScheduleGroup(const ScheduleGroup&) = delete;
    ScheduleGroup& operator=(const ScheduleGroup&) = delete;
    // The group's locks may be held by threads that exist only in the parent, so a forked child cannot destroy the
    // group.
    ~ScheduleGroup() {
        if (!is_forked_from_member()) return;
        static_cast<void>(new std::shared_ptr<CallQueue>(queue_));
        static_cast<void>(new std::shared_ptr<Messenger>(messenger_));
        static_cast<void>(new std::shared_ptr<link::LaneSet>(lanes_));
    }

    nb::object run(std::shared_ptr<const Schedule> schedule, nb::handle fields, std::int64_t predicted_ns) {
        Call call = by_schedule(std::move(schedule), fields, predicted_ns);
        return run_call(*queue(), call);
    }

    PreparedCall* prepare(std::shared_ptr<const Schedule> schedule, nb::handle fields,
                          std::int64_t predicted_ns) const {
        return new PreparedCall(queue(), by_schedule(std::move(schedule), fields, predicted_ns), false);
    }

    std::shared_ptr<Work> submit(std::shared_ptr<const Schedule> schedule, nb::handle fields,
                                 std::int64_t predicted_ns) {
        Call call = by_schedule(std::move(schedule), fields, predicted_ns);
        return submit_call(queue(), std::move(call));
    }

    Message send(int peer, int tag, int dtype, const FlatRanges& tensor, std::int64_t timeout_ns, bool background) {
        const DType type = to_dtype(dtype);
        return start(background, peer, tensor, [&](Messenger& messenger, const ByteStream& stream) {
            return messenger.send(peer, tag, type, stream, timeout_ns);
        });
    }

    Message receive(int peer, int tag, int dtype, const FlatRanges& tensor, std::int64_t timeout_ns, bool background) {
        const DType type = to_dtype(dtype);
        const bool is_any = peer == executor::kAnySource;
        return start(background, is_any ? std::nullopt : std::optional(peer), tensor,
                     [&](Messenger& messenger, const ByteStream& stream) {
                         return messenger.receive(peer, tag, type, stream, timeout_ns);
                     });
    }

    // Returns the ranks that have died, followed by those that have left.
    std::vector<int> gone() const {
        if (!messenger_) return {};
        const std::shared_ptr<Messenger> messenger = messenger_;
        const nb::gil_scoped_release release;
        messenger->poll();
        const auto failure = messenger->failure();
        std::vector<int> ranks = failure ? failure->gone : std::vector<int>{};
        const std::vector<int> left = messenger->left();
        ranks.insert(ranks.end(), left.begin(), left.end());
        return ranks;
    }

    void record_as(std::uint32_t group) const {
        queue()->record_as(group);
        messenger_->record_as(group);
        lanes_->meter().record_as(group);
    }
    void record_messages_as(std::uint32_t group) const {
        if (!messenger_) throw nb::value_error("the group is closed");
        messenger_->record_as(group);
    }

    void abort() const { abort_calls(queue_); }
    int failure() const { return failure_of(queue_); }

    // Returns the first kind of call whose duration differed greatly from its prediction: the operation, algorithm,
    // dtype, number of elements, number of calls, shortest duration and predicted duration (both in ns). Returns None
    // if there is no such kind or it was already returned.
    nb::object prediction_miss() const {
        const auto found = queue_ ? queue_->prediction_miss() : std::nullopt;
        if (!found) return nb::none();
        return nb::make_tuple(static_cast<int>(found->operation), found->algorithm, static_cast<int>(found->dtype),
                              found->count, found->calls, found->min_ns, found->predicted_ns);
    }

    void close() {
        std::shared_ptr<CallQueue> ending = std::move(queue_);
        const nb::gil_scoped_release release;
        if (ending) ending->close();
        ending.reset();
        if (messenger_) messenger_->close();
        messenger_.reset();
        lanes_.reset();
    }

  private:
    Call by_schedule(std::shared_ptr<const Schedule> schedule, nb::handle fields, std::int64_t predicted_ns) const {
        if (!lanes_) throw nb::value_error("the group is closed");
        Call call = to_call(fields);
        require_valid(call, lanes_->rank(), lanes_->size(), false);
        call.predicted_ns = predicted_ns;
        call.algorithm = schedule->algorithm;
        call.schedule = std::move(schedule);
        return call;
    }

    template <class Start>
    Message start(bool background, std::optional<int> peer, const FlatRanges& tensor, Start begin) {
        if (!messenger_) throw nb::value_error("the group is closed");
        if (peer && (*peer < 0 || *peer >= lanes_->size() || *peer == lanes_->rank()))
            throw nb::value_error("the other end of a message is another rank of the group");
        const ByteStream stream = to_stream(tensor);
        std::shared_ptr<Messenger> messenger = messenger_;
        std::shared_ptr<Request> request;
        note_call_site();
        {
            const nb::gil_scoped_release release;
            request = begin(*messenger, stream);
            if (background && !request->done()) messenger->run_in_background();
        }
        return Message(messenger, std::move(request));
    }

    std::shared_ptr<CallQueue> queue() const { return require_usable(queue_); }

    std::shared_ptr<link::LaneSet> lanes_;
    std::shared_ptr<Messenger> messenger_;
    std::shared_ptr<CallQueue> queue_;
};

constexpr std::size_t kMinConnections = 2;  // one for control and at least one for data

ScheduleGroup* create_schedule_group(std::shared_ptr<shm::HostMesh> mesh, std::uint64_t id, int rank,
                                     const std::vector<int>& mesh_ranks, const std::vector<nb::list>& connections,
                                     double timeout_s, std::vector<int> global_ranks) {
    const std::size_t size = mesh_ranks.size();
    std::vector<int> here;
    std::copy_if(mesh_ranks.begin(), mesh_ranks.end(), std::back_inserter(here), [](int each) { return each >= 0; });
    const int place = index_among(here, *mesh);
    if (rank < 0 || static_cast<std::size_t>(rank) >= size ||
        mesh_ranks[static_cast<std::size_t>(rank)] != here[static_cast<std::size_t>(place)])
        throw nb::value_error("the rank is not that of this process in the mesh");
    if (connections.size() != size || (!global_ranks.empty() && global_ranks.size() != size))
        throw nb::value_error("each rank of a group needs a list of connections, and a global rank if another has one");
    for (std::size_t r = 0; r < size; ++r)
        if (mesh_ranks[r] < 0 && connections[r].size() < kMinConnections)
            throw nb::value_error("a rank of another host needs two connections or more");
    const auto deadline = deadline_in(timeout_s);
    std::vector<std::vector<tls::Socket>> sockets(connections.size());
    for (std::size_t r = 0; r < sockets.size(); ++r)
        for (const nb::handle connection : connections[r]) sockets[r].push_back(to_socket(connection));
    std::shared_ptr<link::LaneSet> lanes;
    {
        const nb::gil_scoped_release release;
        lanes = link::LaneSet::create(std::move(mesh), id, rank, mesh_ranks, std::move(sockets), deadline,
                                      std::move(global_ranks));
    }
    return lanes ? new ScheduleGroup(std::move(lanes)) : nullptr;
}

std::shared_ptr<Schedule> make_schedule(int algorithm, std::uint32_t blocks, int rank, int size, const nb::bytes& steps,
                                        int wire) {
    constexpr int last = kQuantized + static_cast<int>(WireType::int4);
    if (algorithm < 0 || algorithm > last) throw nb::value_error("there is no such algorithm");
    if (wire < 0 || wire > static_cast<int>(WireType::int4)) throw nb::value_error("there is no such wire");
    const std::span numbers(reinterpret_cast<const std::int32_t*>(steps.c_str()), steps.size() / sizeof(std::int32_t));
    std::size_t bad_step = 0;
    const auto schedule = Schedule::make(static_cast<std::uint8_t>(algorithm), blocks, rank, size, numbers, &bad_step,
                                         static_cast<WireType>(wire));
    if (schedule) return std::const_pointer_cast<Schedule>(schedule);
    const std::string message =
        "these steps are no schedule for rank " + std::to_string(rank) + " of " + std::to_string(size) + ": see step " +
        std::to_string(bad_step) +
        " (its kind, its peer, its buffers and their numbers of blocks), and that there are whole "
        "steps only";
    throw nb::value_error(message.c_str());
}

// Returns the time, in seconds, that this machine takes to reduce `nbytes` bytes of float32.
double time_reduction(std::size_t nbytes) {
    std::vector<float> a(nbytes / sizeof(float), 1.0F);
    std::vector<float> b = a;
    const void* sources[] = {a.data(), b.data()};
    const ReduceFn kernel = find_reduction(DType::f32, ReduceOp::sum);
    kernel(a.data(), sources, 2, a.size(), 2);
    const auto from = std::chrono::steady_clock::now();
    kernel(a.data(), sources, 2, a.size(), 2);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - from).count();
}

}  // namespace

void register_links(nb::module_& module) {
    nb::class_<Schedule>(module, "Schedule")
        .def_static("make", &make_schedule, nb::arg("algorithm"), nb::arg("blocks"), nb::arg("rank"), nb::arg("size"),
                    nb::arg("steps"), nb::arg("wire") = 0);

    nb::class_<Message>(module, "Message")
        .def("done", &Message::done)
        .def("wait", &Message::wait, nb::arg("timeout_ns"))
        .def("outcome", &Message::outcome)
        .def("source", &Message::source);

    nb::class_<ScheduleGroup>(module, "ScheduleGroup")
        .def_static("create", &create_schedule_group, nb::arg("mesh"), nb::arg("id"), nb::arg("rank"),
                    nb::arg("mesh_ranks"), nb::arg("connections"), nb::arg("timeout_s"),
                    nb::arg("global_ranks") = std::vector<int>{}, nb::rv_policy::take_ownership)
        .def("run", &ScheduleGroup::run, nb::arg("schedule"), nb::arg("call"), nb::arg("predicted_ns") = 0)
        .def("submit", &ScheduleGroup::submit, nb::arg("schedule"), nb::arg("call"), nb::arg("predicted_ns") = 0)
        .def("prepare", &ScheduleGroup::prepare, nb::arg("schedule"), nb::arg("call"), nb::arg("predicted_ns") = 0,
             nb::rv_policy::take_ownership)
        .def("prediction_miss", &ScheduleGroup::prediction_miss)
        .def("send", &ScheduleGroup::send)
        .def("receive", &ScheduleGroup::receive)
        .def("gone", &ScheduleGroup::gone)
        .def("record_as", &ScheduleGroup::record_as)
        .def("record_messages_as", &ScheduleGroup::record_messages_as)
        .def("abort", &ScheduleGroup::abort)
        .def("failure", &ScheduleGroup::failure)
        .def("close", &ScheduleGroup::close);

    module.def("time_reduction", &time_reduction, nb::arg("nbytes"), nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace paceline::bindings
