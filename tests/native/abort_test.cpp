// Tests that an abort ends every wait in a group that uses lanes: for calls, for messages, and for large messages that
// are being transferred.
#include <atomic>

#include "executor/executor.hpp"
#include "ranks.hpp"

namespace {

using namespace ranks;

// A broadcast from rank 0, for which all other ranks wait.
Call star(Rank& at, std::vector<float>& values) {
    std::vector<std::int32_t> flat;
    for (int peer = 1; peer < at.size && at.rank == 0; ++peer) flat.insert(flat.end(), {0, 0, peer, 1, 0, 0, 1, 0, 1});
    if (at.rank != 0) flat.insert(flat.end(), {1, 0, 0, 1, 0, 1, 1, 0, 0});
    Call call;
    call.operation = Operation::broadcast;
    call.dtype = DType::f32;
    call.root = 0;
    call.count = values.size();
    call.timeout_ns = kHung;
    call.outputs.push_back(stream_of(values));
    call.schedule = Schedule::make(1, 1, at.rank, at.size, flat);
    CHECK(call.schedule != nullptr);
    return call;
}

void expect_aborted_by(Rank& at, int who, const Outcome& outcome) {
    CHECK(outcome.code == OutcomeCode::aborted && outcome.reporter == who);
    std::vector<float> values(3);
    Call later = star(at, values);
    CHECK(at.executor.run(later, nullptr, false).code == OutcomeCode::aborted);
    CHECK(at.executor.failure() == OutcomeCode::aborted);
}

void an_abort_ends_calls_that_wait(Over over) {
    std::atomic<int> waiting{0};
    with_ranks(3, 1, over, [&](Rank at) {
        CHECK(at.executor.failure() == OutcomeCode::ok);
        std::vector<float> values(70'000);
        if (at.rank == 0) {
            while (waiting != 2) pause(1);
            pause(50);  // by then, the other ranks are asleep
            at.executor.abort();
        } else {
            ++waiting;
        }
        const auto started = Clock::now();
        Call call = star(at, values);
        expect_aborted_by(at, 0, at.executor.run(call, nullptr, false));
        CHECK(seconds_since(started) < kSoonS);
    });
}

void an_abort_on_another_thread_ends_messages(Over over) {
    with_ranks(2, 1, over, [](Rank at) {
        std::vector<float> values(3);
        const auto request = at.messenger.receive(1 - at.rank, 5, DType::f32, stream_of(values), kHung);
        std::thread aborting([&] {
            pause(50);
            if (at.rank == 1) at.executor.abort();
        });
        CHECK(at.messenger.wait(request, kHung, nullptr));
        aborting.join();
        expect_aborted_by(at, 1, request->outcome());
    });
}

void an_abort_ends_a_flood(Over over) {
    with_ranks(2, 1, over, [](Rank at) {
        std::vector<std::uint8_t> bytes(4 << 20);
        std::thread aborting([&] {
            pause(100);
            if (at.rank == 0) at.messenger.abort();
        });
        const auto started = Clock::now();
        Outcome outcome;
        while (outcome.code == OutcomeCode::ok) {
            const auto request = at.rank == 0 ? at.messenger.send(1, 0, DType::u8, stream_of(bytes), kHung)
                                              : at.messenger.receive(0, 0, DType::u8, stream_of(bytes), kHung);
            CHECK(at.messenger.wait(request, kHung, nullptr));
            outcome = request->outcome();
        }
        aborting.join();
        CHECK(seconds_since(started) < kSoonS);
        expect_aborted_by(at, 0, outcome);
    });
}

void all() {
    for (const Over over : kinds()) {
        an_abort_ends_calls_that_wait(over);
        an_abort_on_another_thread_ends_messages(over);
        an_abort_ends_a_flood(over);
    }
}

}  // namespace

int main() {
    ranks::plain_and_encrypted(all);
}
