// Tests the recorder: entries that are read during a write are consistent, open entries keep their place, and forked
// children do not change the recording of their parent.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "call/call_queue.hpp"
#include "check.hpp"
#include "record/recorder.hpp"
#include "record/snapshot.hpp"

using namespace paceline;
using namespace paceline::record;

namespace {

int memory() {
    static const int fd = [] {
        const int made = memfd_create("paceline-record-test", MFD_CLOEXEC);
        CHECK(ftruncate(made, static_cast<off_t>(kBytes)) == 0);
        CHECK(snapshot(made).empty());
        CHECK(Recorder::begin(made, {"worker", "host", "boot", 5}));
        return made;
    }();
    return fd;
}

template <class Fields>
struct ConsistentEntry {
    std::uint64_t stamp;
    Fields fields;
};

// Returns the entries of a table in a snapshot, in the order of their positions.
template <class Fields>
std::vector<ConsistentEntry<Fields>> table(const std::vector<std::uint8_t>& copied, std::size_t offset,
                                           std::size_t capacity) {
    std::vector<ConsistentEntry<Fields>> entries(capacity);
    static_assert(sizeof(ConsistentEntry<Fields>) == sizeof(EntryOf<Fields>));
    std::memcpy(entries.data(), copied.data() + offset, capacity * sizeof(ConsistentEntry<Fields>));
    return entries;
}

std::vector<ConsistentEntry<CallFields>> calls() {
    return table<CallFields>(snapshot(memory()), offsetof(Recording, calls), kCalls);
}

// All fields have the same value, so that an inconsistent copy is detected.
CallFields uniform(std::uint64_t number) {
    CallFields fields;
    fields.group = static_cast<std::uint32_t>(number);
    fields.sequence = fields.count = fields.arrived = fields.started = number;
    fields.shm_nbytes = fields.tcp_nbytes = fields.missing = number;
    return fields;
}

bool is_whole(const CallFields& fields) {
    const std::uint64_t number = fields.sequence;
    return fields.group == static_cast<std::uint32_t>(number) && fields.count == number && fields.arrived == number &&
           fields.started == number && fields.shm_nbytes == number && fields.missing == number &&
           (fields.ended == 0 || fields.ended == number);
}

void copies_made_while_threads_write_are_whole() {
    constexpr int kThreads = 3;
    constexpr std::uint64_t kEach = 30'000;
    std::vector<std::thread> writers;
    for (int t = 0; t < kThreads; ++t)
        writers.emplace_back([t] {
            for (std::uint64_t i = 1; i <= kEach; ++i) {
                CallFields fields = uniform(i * kThreads + static_cast<std::uint64_t>(t));
                CallEntryHandle handle = Recorder::active()->add(fields, false);
                fields.ended = fields.sequence;
                Recorder::active()->change(handle, fields, true);
            }
        });
    std::uint64_t seen = 0;
    for (int round = 0; round < 20; ++round)
        for (const auto& [stamp, fields] : calls()) {
            if (stamp == 0 || (stamp & kStateMask) == kWriting) continue;
            ++seen;
            CHECK(is_whole(fields));
        }
    for (std::thread& each : writers) each.join();
    CHECK(seen > 0);
    for (const auto& [stamp, fields] : calls()) CHECK(stamp != 0 && is_whole(fields) && fields.ended != 0);
}

void an_open_call_keeps_its_entry_when_the_ring_wraps_around() {
    CallFields mine = uniform(77);
    CallEntryHandle stuck = Recorder::active()->add(mine, false);
    for (std::uint64_t i = 0; i < 3 * kCalls; ++i) {
        CallFields fields = uniform(i);
        CHECK(Recorder::active()->add(fields, true));
    }
    int found = 0;
    for (const auto& [stamp, fields] : calls())
        if ((stamp & kStateMask) == kOpen) found += fields.sequence == 77 && fields.ended == 0;
    CHECK(found == 1);
    mine.ended = 77;
    Recorder::active()->change(stuck, mine, true);
    for (const auto& [stamp, fields] : calls()) CHECK((stamp & kStateMask) == 0);
}

void without_a_free_entry_a_call_is_not_recorded() {
    std::vector<CallEntryHandle> open;
    for (std::size_t i = 0; i < kCalls; ++i) {
        CallFields fields = uniform(i);
        open.push_back(Recorder::active()->add(fields, false));
        CHECK(open.back());
    }
    CallFields fields = uniform(5);
    CallEntryHandle lost = Recorder::active()->add(fields, false);
    CHECK(!lost);
    Recorder::active()->change(lost, fields, true);
    for (CallEntryHandle& each : open) Recorder::active()->change(each, fields, true);
    CHECK(Recorder::active()->add(fields, true));
}

void an_event_whose_entry_was_reused_is_not_changed() {
    const std::uint64_t first = Recorder::active()->add(EventFields{}, false).stamp;
    Recorder::active()->end_event(first);
    Recorder::active()->end_event(first, 1, 2);  // the event has already ended
    for (std::size_t i = 0; i < kEvents; ++i) Recorder::active()->add(EventFields{}, false);
    Recorder::active()->end_event(first, 1, 2);
    const auto events = table<EventFields>(snapshot(memory()), offsetof(Recording, events), kEvents);
    for (const auto& [stamp, fields] : events) CHECK(fields.first == 0);
    for (const auto& [stamp, fields] : events) Recorder::active()->end_event(stamp);
}

void group_entries_are_reused_except_open_ones() {
    const std::vector<int> members = {4, 5, 6};
    const std::uint32_t kept = Recorder::active()->open_group("kept", "engine", 9, 1, members);
    for (std::uint32_t i = 0; i < 3 * kGroups; ++i)
        Recorder::active()->close_group(Recorder::active()->open_group("other", "engine", i, 0, members));
    int found = 0;
    for (const auto& [stamp, fields] : table<GroupFields>(snapshot(memory()), offsetof(Recording, groups), kGroups))
        if (fields.serial == kept) found += fields.closed == 0 && fields.listed == 3 && fields.members[2] == 6;
    CHECK(found == 1);
    Recorder::active()->close_group(kept);
}

void a_forked_child_does_not_write_into_the_recording() {
    CallFields mine = uniform(123'456);
    CallEntryHandle handle = Recorder::active()->add(mine, false);
    const pid_t child = fork();
    if (child == 0) {
        mine.ended = 1;
        handle.entry->stamp.store(0, std::memory_order_relaxed);
        _exit(Recorder::active() == nullptr ? 0 : 1);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK((handle.entry->stamp.load(std::memory_order_relaxed) & kStateMask) == kOpen);
    Recorder::active()->change(handle, mine, true);
}

void memory_of_a_process_that_runs_is_not_taken_over() {
    const pid_t child = fork();
    if (child == 0) {
        const bool taken = Recorder::begin(memory(), {"second", "host", "boot", 5});
        _exit(taken || Recorder::active() != nullptr ? 1 : 0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// A group whose calls complete immediately.
class ImmediateCollectives final : public Collectives {
  public:
    Outcome run(Call& call, const Interrupted& /*interrupted*/, bool /*background*/) override {
        Outcome outcome;
        call.metrics.last_arrived = call.root == 1 ? -1 : 3;
        if (call.root == 1) {
            outcome.code = OutcomeCode::timed_out;
            outcome.missing = {2, 5};
        }
        return outcome;
    }
    void abort() override {}
    OutcomeCode failure() override { return OutcomeCode::ok; }
};

void a_queue_records_its_calls() {
    CallQueue queue(std::make_unique<ImmediateCollectives>());
    const std::uint32_t serial = Recorder::active()->open_group("queue", "engine", 0, 0, {});
    Call unknown;
    queue.run(unknown, [] { return false; });  // not recorded, because the group has no serial number yet
    queue.record_as(serial);
    Call call;
    call.operation = Operation::broadcast;
    call.root = 1;
    queue.run(call, [] { return false; });
    call.root = 0;
    CHECK(queue.submit(call)->wait(10'000'000'000));
    queue.close();
    std::vector<CallFields> mine;
    for (const auto& [stamp, fields] : calls())
        if (fields.group == serial && fields.operation == static_cast<std::uint8_t>(Operation::broadcast))
            mine.push_back(fields);
    CHECK(mine.size() == 2);
    CHECK(mine[0].sequence == 2 && mine[0].state == CallState::failed && mine[0].first_missing == 2 &&
          mine[0].missing == (1 << 0 | 1 << 3));
    CHECK(mine[0].is_async == 0 && mine[0].outcome == static_cast<std::uint8_t>(OutcomeCode::timed_out));
    CHECK(mine[1].sequence == 3 && mine[1].state == CallState::done && mine[1].is_async == 1 &&
          mine[1].last_arrived == 3);
    CHECK(mine[1].arrived <= mine[1].started && mine[1].started <= mine[1].ended);
    CHECK(mine[1].complete == mine[1].ended && mine[0].complete == 0);
}

void the_clock_is_calibrated_from_the_start() {
    const auto pairs = table<PairFields>(snapshot(memory()), offsetof(Recording, pairs), kPairs);
    CHECK(pairs[0].stamp != 0 && pairs[1].stamp != 0);
    const auto& first = pairs[0].fields;
    const auto& second = pairs[1].fields;
    CHECK(second.tick > first.tick && second.monotonic_ns > first.monotonic_ns);
    const double speed =
        static_cast<double>(second.tick - first.tick) / static_cast<double>(second.monotonic_ns - first.monotonic_ns);
    CHECK(speed > 0.001 && speed < 20.0);
}

// Prints the time that recording a call takes. There is no assertion, because other processes may affect the time.
void print_the_cost_of_a_call() {
    constexpr int kCount = 100'000;
    Call call;
    const std::int64_t from_ns = nanoseconds_of(CLOCK_THREAD_CPUTIME_ID);
    for (int i = 0; i < kCount; ++i) {
        RecordedCall recorded;
        recorded.arrive(1, call, static_cast<std::uint64_t>(i), false);
        recorded.end(call.metrics, Outcome{});
    }
    const std::int64_t took_ns = nanoseconds_of(CLOCK_THREAD_CPUTIME_ID) - from_ns;
    std::printf("a recorded call takes %.1f ns of its thread\n", static_cast<double>(took_ns) / kCount);
}

}  // namespace

int main() {
    memory();
    copies_made_while_threads_write_are_whole();
    an_open_call_keeps_its_entry_when_the_ring_wraps_around();
    without_a_free_entry_a_call_is_not_recorded();
    an_event_whose_entry_was_reused_is_not_changed();
    group_entries_are_reused_except_open_ones();
    a_forked_child_does_not_write_into_the_recording();
    memory_of_a_process_that_runs_is_not_taken_over();
    a_queue_records_its_calls();
    the_clock_is_calibrated_from_the_start();
    print_the_cost_of_a_call();
    std::printf("ok\n");
    return 0;
}
