// Tests schedules over lanes: a ring all-reduce with a schedule built here by hand, and every way in which a call can
// fail.
#include "executor/executor.hpp"

#include <atomic>
#include <cstring>

#include "call/poll_interval.hpp"
#include "executor/stripes.hpp"
#include "ranks.hpp"

namespace {

using namespace ranks;

using Flat = std::vector<std::int32_t>;
using ScheduleOf = std::shared_ptr<const Schedule>;

constexpr std::int32_t kSend = 0, kReceive = 1, kReduce = 2, kCopy = 3;
constexpr std::int32_t kInput = 0, kOutput = 1, kScratch = 2;

// In each step of the first phase, every rank receives a partly reduced block from its left neighbor and adds its own
// values. In the second phase, the ranks forward the sums around the ring.
ScheduleOf ring_all_reduce(int rank, int n) {
    Flat flat;
    const int right = (rank + 1) % n;
    const int left = (rank + n - 1) % n;
    const auto block = [n](int number) { return ((number % n) + n) % n; };
    const auto add = [&](std::int32_t kind, bool final, int peer, int to, int from) {
        // The values are inserted one by one because GCC 12 for arm64 warns about an overflow inside std::vector if
        // they are inserted at once.
        for (const int value : std::initializer_list<int>{kind, final, peer, 1, to, to >= 0, 1, from, from >= 0})
            flat.push_back(value);
        for (std::size_t at : {flat.size() - 5, flat.size() - 2})
            if (flat[at] < 0) flat[at] = 0;
    };
    for (int s = 0; s < n - 1; ++s) {
        add(kSend, false, right, -1, block(rank - s));
        add(kReduce, s == n - 2, left, block(rank - s - 1), block(rank - s - 1));
    }
    for (int s = 0; s < n - 1; ++s) {
        add(kSend, false, right, -1, block(rank + 1 - s));
        add(kReceive, false, left, block(rank - s), -1);
    }
    return Schedule::make(1, static_cast<std::uint32_t>(n), rank, n, flat);
}

// Rank 0 sends its whole tensor to every other rank. The other ranks only receive.
ScheduleOf star_broadcast(int rank, int n) {
    Flat flat;
    for (int peer = 1; peer < n && rank == 0; ++peer) flat.insert(flat.end(), {kSend, 0, peer, 1, 0, 0, 1, 0, 1});
    if (rank != 0) flat.insert(flat.end(), {kReceive, 0, 0, 1, 0, 1, 1, 0, 0});
    return Schedule::make(2, 1, rank, n, flat);
}

Call all_reduce(Rank& at, DType dtype, ReduceOp op, std::uint64_t count, ByteStream tensor,
                std::int64_t timeout_ns = kHung) {
    Call call;
    call.operation = Operation::all_reduce;
    call.dtype = dtype;
    call.reduce_op = op;
    call.count = count;
    call.timeout_ns = timeout_ns;
    call.outputs.push_back(std::move(tensor));
    call.schedule = ring_all_reduce(at.rank, at.size);
    CHECK(call.schedule != nullptr);
    return call;
}

Call broadcast(Rank& at, std::vector<float>& values, std::int64_t timeout_ns = kHung) {
    Call call;
    call.operation = Operation::broadcast;
    call.dtype = DType::f32;
    call.reduce_op = ReduceOp::none;
    call.root = 0;
    call.count = values.size();
    call.timeout_ns = timeout_ns;
    call.outputs.push_back(stream_of(values));
    call.schedule = star_broadcast(at.rank, at.size);
    return call;
}

Outcome sum(Rank& at, std::size_t count) {
    std::vector<float> values(count, static_cast<float>(at.rank + 1));
    Call call = all_reduce(at, DType::f32, ReduceOp::sum, count, stream_of(values));
    Outcome outcome = at.executor.run(call, nullptr, false);
    // Compares all elements with one memcmp, because an element-by-element comparison is slow with sanitizers.
    const std::vector<float> sums(count, static_cast<float>(at.size * (at.size + 1) / 2));
    if (outcome.code == OutcomeCode::ok && count != 0)
        CHECK(std::memcmp(values.data(), sums.data(), count * sizeof(float)) == 0);
    return outcome;
}

void sums_are_right_for_every_size_and_number_of_streams() {
    constexpr std::size_t kStripe = executor::kStripe / sizeof(float);
    for (const int streams : {1, 2, 4})
        for (const int n : {2, 3})
            with_ranks(n, streams, Over::sockets, [n](Rank at) {
                const auto blocks = static_cast<std::size_t>(n);
                for (const std::size_t count :
                     {std::size_t{0}, std::size_t{1}, std::size_t{2}, std::size_t{1023}, blocks * kStripe - 1,
                      blocks * kStripe, blocks * kStripe + 1, 2 * blocks * kStripe + 17, std::size_t{7 * kStripe + 5}})
                    CHECK(sum(at, count).code == OutcomeCode::ok);
            });
    with_ranks(3, 1, Over::rings, [](Rank at) {
        for (const std::size_t count : {0, 1, 2, 100, 1023, 65'536, 200'003})
            CHECK(sum(at, count).code == OutcomeCode::ok);
    });
}

void every_element_gets_its_own_sum(Over over, int streams) {
    with_ranks(3, streams, over, [](Rank at) {
        std::vector<std::int64_t> values(400'001);
        for (std::size_t i = 0; i < values.size(); ++i)
            values[i] = static_cast<std::int64_t>(i) * (at.rank + 1) + at.rank;
        Call call = all_reduce(at, DType::i64, ReduceOp::sum, values.size(), stream_of(values));
        CHECK(at.executor.run(call, nullptr, false).code == OutcomeCode::ok);
        for (std::size_t i = 0; i < values.size(); ++i) CHECK(values[i] == static_cast<std::int64_t>(i) * 6 + 3);
    });
}

void averages_are_divided_once_and_bytes_stay_in_place() {
    with_ranks(3, 2, Over::sockets, [](Rank at) {
        std::vector<float> values(300'007, 3.0F * static_cast<float>(at.rank));
        Call call = all_reduce(at, DType::f32, ReduceOp::avg, values.size(), stream_of(values));
        CHECK(at.executor.run(call, nullptr, false).code == OutcomeCode::ok);
        for (const float value : values) CHECK(value == 3.0F);
        std::vector<std::uint8_t> bytes(1'000'003);
        for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(i % 80);
        Call small = all_reduce(at, DType::u8, ReduceOp::sum, bytes.size(), stream_of(bytes));
        CHECK(at.executor.run(small, nullptr, false).code == OutcomeCode::ok);
        for (std::size_t i = 0; i < bytes.size(); ++i) CHECK(bytes[i] == 3 * (i % 80));
    });
}

void a_list_of_tensors_is_reduced_as_one(Over over) {
    with_ranks(2, 2, over, [](Rank at) {
        std::vector<std::vector<float>> list;
        std::vector<ByteRange> ranges;
        std::size_t count = 0;
        // The ranks divide their tensor lists at different offsets.
        for (std::size_t n = at.rank == 0 ? 1 : 30'000; count < 300'000; n = n * 7 % 40'009) {
            n = std::min(n, 300'000 - count);
            list.emplace_back(n, static_cast<float>(at.rank + 1));
            count += n;
            list.emplace_back();
        }
        for (auto& each : list)
            ranges.push_back({reinterpret_cast<std::uint8_t*>(each.data()), each.size() * sizeof(float)});
        Call call = all_reduce(at, DType::f32, ReduceOp::sum, count, ByteStream(std::move(ranges)));
        CHECK(at.executor.run(call, nullptr, false).code == OutcomeCode::ok);
        for (const auto& each : list)
            for (const float value : each) CHECK(value == 3.0F);
    });
}

// Nothing is sent before the whole schedule has been checked, so the group remains usable.
void a_schedule_that_does_not_fit_its_call_is_refused() {
    with_ranks(2, 1, Over::sockets, [](Rank at) {
        const int other = 1 - at.rank;
        const Flat good = {kSend, 0, other, kOutput, 0, 0, kOutput, 0, 2};
        const Flat bad[] = {{kSend, 0, other, kOutput, 0, 0, kOutput, 1, 2},  // there are only two blocks
                            {kSend, 0, other, kOutput, 0, 0, kInput, 0, 1},   // the input has no blocks
                            {kReceive, 0, other, kScratch, 2, 1, kOutput, 0, 0},
                            {kReduce, 0, other, kOutput, 0, 1, kScratch, 4, 1},
                            {kCopy, 0, -1, kOutput, 0, 1, kOutput, 1, 1}};  // the blocks have 4 and 3 elements
        for (const Flat& step : bad) {
            Flat steps = good;
            steps.insert(steps.end(), step.begin(), step.end());
            std::vector<float> values(7);
            Call call = all_reduce(at, DType::f32, ReduceOp::sum, values.size(), stream_of(values));
            call.schedule = Schedule::make(1, 2, at.rank, 2, steps);
            const Outcome outcome = at.executor.run(call, nullptr, false);
            CHECK(outcome.code == OutcomeCode::schedule_unfit && outcome.step == 1);
        }
        std::vector<float> values(7);
        Call longer = all_reduce(at, DType::f32, ReduceOp::sum, values.size() + 1, stream_of(values));
        Call without_kernel = all_reduce(at, DType::f32, ReduceOp::none, values.size(), stream_of(values));
        Call of_another_rank = all_reduce(at, DType::f32, ReduceOp::sum, values.size(), stream_of(values));
        of_another_rank.schedule = ring_all_reduce(other, 2);
        Call of_another_world = all_reduce(at, DType::f32, ReduceOp::sum, values.size(), stream_of(values));
        of_another_world.schedule = ring_all_reduce(at.rank, 3);
        for (Call* call : {&longer, &without_kernel, &of_another_rank, &of_another_world})
            CHECK(at.executor.run(*call, nullptr, false).code == OutcomeCode::schedule_unfit);
        CHECK(sum(at, 100).code == OutcomeCode::ok);
    });
}

void a_mismatch_reaches_every_rank() {
    std::atomic<int> done = 0;
    with_ranks(3, 2, Over::sockets, [&](Rank at) {
        CHECK(sum(at, 100).code == OutcomeCode::ok);
        ++done;
        while (done < 3) pause(1);  // the second call's failure would also fail a rank that is still in the first call
        const Outcome outcome = sum(at, at.rank == 1 ? 7 : 8);
        CHECK(outcome.code == OutcomeCode::mismatch && outcome.calls.size() == 3 && outcome.reporter >= 0);
        CHECK(outcome.calls[1].count == 7 || outcome.calls[1].sequence < 2);
        CHECK(sum(at, 8).code == OutcomeCode::mismatch);  // the group is permanently broken
    });
}

// The root of a broadcast completes its call once its bytes have been sent.
void a_mismatch_fails_the_next_call_of_a_rank_that_was_done() {
    std::atomic<bool> failed = false;
    with_ranks(3, 1, Over::sockets, [&](Rank at) {
        std::vector<float> values(at.rank == 2 ? 9 : 10);
        Call call = broadcast(at, values);
        const Outcome outcome = at.executor.run(call, nullptr, false);
        if (at.rank == 2) {
            CHECK(outcome.code == OutcomeCode::mismatch);
            failed = true;
        }
        while (!failed) pause(1);
        // A rank that never waits checks for failures once per poll interval.
        pause(2 * static_cast<int>(kPollInterval.count()));
        Call next = broadcast(at, values);
        CHECK(at.executor.run(next, nullptr, false).code == OutcomeCode::mismatch);
    });
}

// Each of the two roots completes the broadcast, and receives the other root's message in the next call.
void two_roots_of_a_broadcast_are_both_named() {
    with_ranks(2, 1, Over::sockets, [](Rank at) {
        CHECK(sum(at, 10).code == OutcomeCode::ok);
        std::vector<float> values(10);
        Call call = broadcast(at, values);
        call.root = at.rank;
        const Flat flat{kSend, 0, 1 - at.rank, 1, 0, 0, 1, 0, 1};
        call.schedule = Schedule::make(2, 1, at.rank, 2, flat);
        CHECK(at.executor.run(call, nullptr, false).code == OutcomeCode::ok);
        const Outcome outcome = sum(at, 10);
        CHECK(outcome.code == OutcomeCode::mismatch && outcome.calls.size() == 2);
        for (const int rank : {0, 1}) {
            const CallHeader& header = outcome.calls[static_cast<std::size_t>(rank)];
            CHECK(header.sequence == 2 && header.operation == Operation::broadcast && header.root == rank);
        }
    });
}

void a_missing_rank_is_named_with_its_latest_call() {
    std::atomic<bool> waits = false;
    std::atomic<int> ranks_done = 0;
    with_ranks(3, 1, Over::sockets, [&](Rank at) {
        CHECK(sum(at, 10).code == OutcomeCode::ok);
        if (at.rank == 2) {
            while (ranks_done < 2) pause(1);
            return;
        }
        if (at.rank == 0)
            while (!waits) pause(1);
        const auto started = Clock::now();
        std::vector<float> values(10);
        Call call = all_reduce(at, DType::f32, ReduceOp::sum, values.size(), stream_of(values),
                               at.rank == 0 ? 300 * kMs : kHung);
        const Outcome outcome = at.executor.run(call, records_that_it_waits(waits), false);
        CHECK(outcome.code == OutcomeCode::timed_out && (outcome.missing == std::vector<int>{2}));
        CHECK(outcome.calls.size() == 3 && outcome.waited_ns >= 300 * kMs && seconds_since(started) < kSoonS);
        ++ranks_done;
    });
}

// Rank 2 stops while it is waiting. Rank 0 is the first to time out, although it does not wait for rank 2.
void a_rank_that_stops_in_a_call_is_found_through_the_others(Over over) {
    std::atomic<bool> held = false;
    std::atomic<int> ranks_done = 0;
    with_ranks(4, 1, over, [&](Rank at) {
        const Interrupted stop = [&] {
            held = true;
            while (ranks_done < 3) pause(1);
            return false;
        };
        if (at.rank == 0)
            while (!held) pause(1);
        std::vector<float> values(400'000, 1.0F);  // more data than the lanes can buffer
        const std::int64_t timeout_ns = at.rank == 0 ? kSecond : kHung;
        Call call = all_reduce(at, DType::f32, ReduceOp::sum, values.size(), stream_of(values), timeout_ns);
        const Outcome outcome = at.executor.run(call, at.rank == 2 ? stop : nullptr, false);
        CHECK(outcome.code == OutcomeCode::timed_out && outcome.has_begun && outcome.reporter == 0);
        CHECK((outcome.missing == std::vector<int>{2}));
        ++ranks_done;
    });
}

// Rank 0 is late in beginning a broadcast. Rank 1 forwards the broadcast to rank 2.
void a_rank_that_blocks_a_chain_has_not_begun() {
    std::atomic<bool> waits = false;
    std::atomic<int> ranks_done = 0;
    with_ranks(3, 1, Over::sockets, [&](Rank at) {
        Flat flat;
        if (at.rank > 0) flat.insert(flat.end(), {kReceive, 0, at.rank - 1, 1, 0, 1, 1, 0, 0});
        if (at.rank < 2) flat.insert(flat.end(), {kSend, 0, at.rank + 1, 1, 0, 0, 1, 0, 1});
        std::vector<float> values(10);
        Call call = broadcast(at, values, at.rank == 2 ? 300 * kMs : kHung);
        call.schedule = Schedule::make(2, 1, at.rank, 3, flat);
        if (at.rank == 0)
            while (ranks_done < 2) pause(1);
        if (at.rank == 2)
            while (!waits) pause(1);
        const Outcome outcome = at.executor.run(call, records_that_it_waits(waits), false);
        CHECK(outcome.code == OutcomeCode::timed_out && !outcome.has_begun && (outcome.missing == std::vector<int>{0}));
        ++ranks_done;
    });
}

// Rank 3 makes no call, rank 2 waits for a message from rank 3, and ranks 0 and 1 wait for rank 2.
void a_waiting_rank_is_distinguished_from_the_blocking_rank(Over over) {
    std::atomic<bool> waits = false;
    std::atomic<int> ranks_done = 0;
    with_ranks(4, 1, over, [&](Rank at) {
        std::vector<float> values(10);
        if (at.rank == 3)
            while (ranks_done < 3) pause(1);
        if (at.rank == 2) {
            const auto request = at.messenger.receive(3, 0, DType::f32, stream_of(values), kHung);
            CHECK(at.messenger.wait(request, kHung, records_that_it_waits(waits)));
        }
        if (at.rank < 2) {
            while (!waits) pause(1);
            const std::int64_t timeout_ns = at.rank == 0 ? 300 * kMs : kHung;
            Call call = broadcast(at, values, timeout_ns);
            call.root = 2;
            Flat flat;
            flat.insert(flat.end(), {kReceive, 0, 2, 1, 0, 1, 1, 0, 0});
            call.schedule = Schedule::make(2, 1, at.rank, 4, flat);
            const Outcome outcome = at.executor.run(call, nullptr, false);
            CHECK(outcome.code == OutcomeCode::timed_out && !outcome.has_begun &&
                  outcome.missing == std::vector<int>{2});
            CHECK(outcome.waiting == std::vector<int>{2} && outcome.blocked_by == std::vector<int>{3});
        }
        ++ranks_done;
    });
}

// Rank 1 waits for rank 2 in a second group, which does not contain rank 0.
void a_rank_that_blocks_another_group_is_found() {
    std::atomic<bool> waits = false;
    std::atomic<int> ranks_done = 0;
    with_ranks(3, 1, Over::rings, [&](Rank at) {
        std::unique_ptr<link::LaneSet> lanes;
        std::unique_ptr<Messenger> messenger;
        if (at.rank > 0) {
            lanes = link::LaneSet::create(at.mesh, 2, at.rank - 1, {1, 2}, std::vector<std::vector<tls::Socket>>(2),
                                          Clock::now() + std::chrono::nanoseconds(kHung), {1, 2});
            CHECK(lanes != nullptr);
            messenger = std::make_unique<Messenger>(*lanes);
        }
        std::vector<float> values(10);
        if (at.rank == 0) {
            while (!waits) pause(1);
            Call call = all_reduce(at, DType::f32, ReduceOp::sum, values.size(), stream_of(values), 300 * kMs);
            const Outcome outcome = at.executor.run(call, nullptr, false);
            CHECK(outcome.code == OutcomeCode::timed_out && !outcome.has_begun &&
                  (outcome.missing == std::vector<int>{1, 2}));
            CHECK(outcome.waiting == std::vector<int>{1} && outcome.blocked_by.empty());
            CHECK((outcome.cause == FailureCause{2, false, true}));
            ranks_done = 1;
        } else if (at.rank == 1) {
            const auto request = messenger->receive(1, 0, DType::f32, stream_of(values), kHung);
            const Interrupted stop = [&] {
                waits = true;
                return ranks_done == 1;
            };
            CHECK(messenger->wait(request, kHung, stop) && request->outcome().code == OutcomeCode::interrupted);
            ranks_done = 2;
        }
        while (ranks_done < 2) pause(1);
    });
}

// Two ranks wait for each other in different calls.
void ranks_in_a_deadlock_receive_that_outcome(Over over) {
    std::atomic<bool> waits = false;
    std::atomic<int> ranks_done = 0;
    with_ranks(2, 1, over, [&](Rank at) {
        std::vector<float> values(10);
        Outcome outcome;
        if (at.rank == 1) {
            const auto request = at.messenger.receive(0, 0, DType::f32, stream_of(values), kHung);
            CHECK(at.messenger.wait(request, kHung, records_that_it_waits(waits)));
            outcome = request->outcome();
        } else {
            while (!waits) pause(1);
            Call call = all_reduce(at, DType::f32, ReduceOp::sum, values.size(), stream_of(values), 300 * kMs);
            outcome = at.executor.run(call, nullptr, false);
        }
        CHECK(outcome.code == OutcomeCode::timed_out && outcome.missing == std::vector<int>{1});
        CHECK(outcome.waiting == std::vector<int>{1} && outcome.blocked_by.empty() && !outcome.cause.known());
        ++ranks_done;
        while (ranks_done < 2) pause(1);
    });
}

// Rank 0 sends its data and returns, but rank 1 does not forward the data. When rank 2 times out, only rank 1 is
// responsible.
void a_rank_that_did_its_part_is_not_among_the_missing() {
    std::atomic<bool> ranks_done = false;
    with_ranks(3, 1, Over::sockets, [&](Rank at) {
        Flat flat;  // rank 0 sends to rank 1, which forwards to rank 2
        if (at.rank < 2) flat.insert(flat.end(), {kSend, 0, at.rank + 1, 1, 0, 0, 1, 0, 1});
        if (at.rank > 0) flat.insert(flat.begin(), {kReceive, 0, at.rank - 1, 1, 0, 1, 1, 0, 0});
        std::vector<float> values(10);
        Call call = broadcast(at, values, at.rank == 2 ? 300 * kMs : kHung);
        call.schedule = Schedule::make(2, 1, at.rank, 3, flat);
        if (at.rank == 0) CHECK(at.executor.run(call, nullptr, false).code == OutcomeCode::ok);
        if (at.rank == 2) {
            const Outcome outcome = at.executor.run(call, nullptr, false);
            CHECK(outcome.code == OutcomeCode::timed_out && (outcome.missing == std::vector<int>{1}));
            ranks_done = true;
        }
        while (!ranks_done) pause(1);
    });
}

void a_rank_that_leaves_is_named(Over over) {
    for (const bool in_the_middle : {false, true}) {
        std::atomic<int> ranks_done = 0;
        with_ranks(3, 2, over, [in_the_middle, &ranks_done](Rank at) {
            CHECK(sum(at, 10).code == OutcomeCode::ok);
            if (at.rank == 2) {
                if (in_the_middle) pause(100);
                at.messenger.close();
                while (ranks_done < 2) pause(5);  // the rank has left only this group
                return;
            }
            const Outcome outcome = sum(at, 500'000);
            CHECK(outcome.code == OutcomeCode::peer_lost && (outcome.missing == std::vector<int>{2}));
            CHECK(outcome.left == std::vector<int>{2});
            ++ranks_done;
        });
    }
}

void an_interrupt_ends_the_call_everywhere() {
    std::atomic<bool> ended = false;
    with_ranks(2, 1, Over::sockets, [&](Rank at) {
        std::vector<float> values(10);
        Call call = all_reduce(at, DType::f32, ReduceOp::sum, 10, stream_of(values));
        if (at.rank == 1) {
            while (!ended) pause(1);
            CHECK(at.executor.run(call, nullptr, false).code == OutcomeCode::interrupted);
            return;
        }
        const auto started = Clock::now();
        const Outcome outcome = at.executor.run(call, [&] { return seconds_since(started) > 0.05; }, false);
        CHECK(outcome.code == OutcomeCode::interrupted && seconds_since(started) < kSoonS);
        ended = true;
    });
}

void messages_and_collectives_run_side_by_side(Over over) {
    with_ranks(2, 2, over, [](Rank at) {
        std::thread talker([&at] {
            std::vector<std::uint8_t> word(70'000, static_cast<std::uint8_t>(at.rank));
            for (int i = 0; i < 60; ++i) {
                const bool sends = (i + at.rank) % 2 == 0;
                const auto request = sends ? at.messenger.send(1 - at.rank, 0, DType::u8, stream_of(word), kHung)
                                           : at.messenger.receive(1 - at.rank, 0, DType::u8, stream_of(word), kHung);
                CHECK(at.messenger.wait(request, kHung, nullptr) && request->outcome().code == OutcomeCode::ok);
            }
        });
        for (int i = 0; i < 60; ++i) CHECK(sum(at, static_cast<std::size_t>(i) * 997).code == OutcomeCode::ok);
        talker.join();
    });
}

void all() {
    sums_are_right_for_every_size_and_number_of_streams();
    every_element_gets_its_own_sum(Over::sockets, 4);
    if (!encrypts) every_element_gets_its_own_sum(Over::rings, 1);
    averages_are_divided_once_and_bytes_stay_in_place();
    for (const Over over : kinds()) a_list_of_tensors_is_reduced_as_one(over);
    a_schedule_that_does_not_fit_its_call_is_refused();
    a_mismatch_reaches_every_rank();
    a_mismatch_fails_the_next_call_of_a_rank_that_was_done();
    two_roots_of_a_broadcast_are_both_named();
    a_missing_rank_is_named_with_its_latest_call();
    a_rank_that_did_its_part_is_not_among_the_missing();
    for (const Over over : kinds()) a_rank_that_stops_in_a_call_is_found_through_the_others(over);
    a_rank_that_blocks_a_chain_has_not_begun();
    for (const Over over : kinds()) a_waiting_rank_is_distinguished_from_the_blocking_rank(over);
    a_rank_that_blocks_another_group_is_found();
    for (const Over over : kinds()) ranks_in_a_deadlock_receive_that_outcome(over);
    for (const Over over : kinds()) a_rank_that_leaves_is_named(over);
    an_interrupt_ends_the_call_everywhere();
    for (const Over over : kinds()) messages_and_collectives_run_side_by_side(over);
}

}  // namespace

int main() {
    ranks::plain_and_encrypted(all);
}
