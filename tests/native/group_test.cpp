// Tests the collectives of host groups. Each rank is a thread with its own mesh and group.
#include "host/group.hpp"

#include <algorithm>
#include <atomic>
#include <functional>
#include <optional>
#include <thread>

#include "call/call_queue.hpp"
#include "check.hpp"
#include "host/group.hpp"

namespace {

using namespace paceline;
using namespace paceline::host;

constexpr std::size_t kSlot = 4096;
constexpr std::int64_t kSecond = 1'000'000'000;
constexpr std::int64_t kHung = 60 * kSecond;  // a limit that a test reaches only if it hangs

struct Rank {
    int rank;
    shm::HostMesh& mesh;
    Group& group;
};

void pause(int ms) {
    std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

using Where = std::function<std::optional<LocalityDomain>(int rank)>;

void with_ranks(int n, const std::function<void(Rank)>& body, const Where& where = [](int) { return std::nullopt; }) {
    const auto directory = shm::HostDirectory::create(n);
    CHECK(directory != nullptr);
    std::vector<std::thread> threads;
    for (int r = 0; r < n; ++r)
        threads.emplace_back([&, r] {
            shm::HostMesh mesh(r, directory);
            std::vector<int> members;
            for (int m = 0; m < n; ++m) members.push_back(m);
            const auto deadline = std::chrono::steady_clock::now() + std::chrono::nanoseconds(kHung);
            const auto group = Group::create(mesh, members, 1, kSlot, deadline, 1, where(r));
            CHECK(group != nullptr);
            body({r, mesh, *group});
            mesh.close();
        });
    for (std::thread& thread : threads) thread.join();
}

Call sum_of(std::vector<float>& values) {
    Call call;
    call.operation = Operation::all_reduce;
    call.dtype = DType::f32;
    call.reduce_op = ReduceOp::sum;
    call.count = values.size();
    call.timeout_ns = kHung;
    call.outputs.emplace_back(
        std::vector<ByteRange>{{reinterpret_cast<std::uint8_t*>(values.data()), 4 * values.size()}});
    return call;
}

Call barrier(std::int64_t timeout_ns) {
    Call call;
    call.operation = Operation::barrier;
    call.timeout_ns = timeout_ns;
    return call;
}

void sums_are_right_for_every_size() {
    for (const int n : {1, 2, 3, 5})
        with_ranks(n, [n](Rank at) {
            for (const std::size_t count : {0, 1, 18, 19, 1024, 1025, 50'000}) {
                std::vector<float> values(count, static_cast<float>(at.rank + 1));
                Call call = sum_of(values);
                CHECK(at.group.run(call, nullptr, false).code == OutcomeCode::ok);
                for (const float value : values) CHECK(value == static_cast<float>(n * (n + 1) / 2));
            }
        });
}

// The result depends on the order of the additions: rank 0 contributes 2^24, every other rank contributes 1, and 2^24 +
// 1 is rounded to 2^24.
float in_the_order_of_the_tree(int low, int high) {
    if (high - low == 1) return low == 0 ? 16777216.0f : 1.0f;
    int half = 1;
    while (half * 2 < high - low) half *= 2;
    return in_the_order_of_the_tree(low, low + half) + in_the_order_of_the_tree(low + half, high);
}

void a_sum_out_of_place_follows_the_tree_and_leaves_its_input() {
    for (const int n : {1, 2, 3, 5, 6})
        with_ranks(n, [n](Rank at) {
            for (const std::size_t count : {0, 1, 18, 19, 1023, 1024, 1025, 9000, 50'000}) {
                const float mine = at.rank == 0 ? 16777216.0f : 1.0f;
                std::vector<float> input(count, mine), output(count, -1.0f);
                Call call = sum_of(output);
                // The ranges of the input and the output may end at different offsets.
                auto* const bytes = reinterpret_cast<std::uint8_t*>(input.data());
                const std::size_t first = count / 3 * 4;
                call.inputs.emplace_back(std::vector<ByteRange>{{bytes, first}, {bytes + first, 4 * count - first}});
                CHECK(at.group.run(call, nullptr, false).code == OutcomeCode::ok);
                for (const float value : input) CHECK(value == mine);
                for (const float value : output) CHECK(value == in_the_order_of_the_tree(0, n));
            }
        });
}

// The ranks are on a simulated machine with several NUMA nodes, so they reduce in blocks.
void sums_in_blocks_have_the_bits_of_those_without() {
    for (const auto& [n, in_node] : {std::pair{8, 4}, {12, 4}, {16, 8}})
        with_ranks(
            n,
            [n = n](Rank at) {
                for (const std::size_t count : {8192, 8193, 50'000}) {
                    std::vector<float> values(count, at.rank == 0 ? 16777216.0f : 1.0f);
                    Call sum = sum_of(values);
                    CHECK(at.group.run(sum, nullptr, false).code == OutcomeCode::ok);
                    for (const float value : values) CHECK(value == in_the_order_of_the_tree(0, n));

                    std::vector<float> means(count, static_cast<float>(at.rank));
                    Call mean = sum_of(means);
                    mean.reduce_op = ReduceOp::avg;
                    CHECK(at.group.run(mean, nullptr, false).code == OutcomeCode::ok);
                    for (const float value : means) CHECK(value == static_cast<float>(n - 1) / 2);

                    std::vector<float> to_one(count, static_cast<float>(at.rank + 1));
                    Call reduce = sum_of(to_one);
                    reduce.operation = Operation::reduce;
                    reduce.root = n - 1;
                    CHECK(at.group.run(reduce, nullptr, false).code == OutcomeCode::ok);
                    const int wanted = at.rank == n - 1 ? n * (n + 1) / 2 : at.rank + 1;
                    for (const float value : to_one) CHECK(value == static_cast<float>(wanted));
                }
            },
            [in_node = in_node](int rank) { return LocalityDomain{rank / in_node, -1}; });
}

void a_call_is_made_again_from_the_front() {
    for (const int n : {1, 2, 3})
        with_ranks(n, [n](Rank at) {
            for (const std::size_t count : {0, 1, 18, 19, 1024, 9000, 50'000}) {
                std::vector<float> input(count), output(count);
                Call call = sum_of(output);
                auto* const bytes = reinterpret_cast<std::uint8_t*>(input.data());
                const std::size_t first = count / 3 * 4;
                call.inputs.emplace_back(std::vector<ByteRange>{{bytes, first}, {bytes + first, 4 * count - first}});
                for (int made = 1; made <= 3; ++made) {
                    std::fill(input.begin(), input.end(), static_cast<float>(made * (at.rank + 1)));
                    call.inputs[0].rewind();
                    call.outputs[0].rewind();
                    CHECK(at.group.run(call, nullptr, false).code == OutcomeCode::ok);
                    for (const float value : output) CHECK(value == static_cast<float>(made * n * (n + 1) / 2));
                }
            }
        });
}

void a_thread_notifies_once_before_it_waits() {
    std::atomic<int> cause{0};
    with_ranks(2, [&cause](Rank at) {
        const std::function<void()> tell = [&cause] { cause.fetch_add(1); };
        std::vector<float> values(3, 1.0f);
        Call call = sum_of(values);
        if (at.rank == 0) call.before_waiting = &tell;
        while (at.rank == 1 && cause.load() == 0) std::this_thread::yield();
        CHECK(at.group.run(call, nullptr, false).code == OutcomeCode::ok);
        CHECK(call.before_waiting == nullptr && values[0] == 2.0f);
    });
    CHECK(cause.load() == 1);
}

void a_mismatch_fails_equally_and_leaves_the_group_usable() {
    with_ranks(3, [](Rank at) {
        std::vector<float> values(at.rank == 1 ? 7 : 8, 1.0f);
        Call wrong = sum_of(values);
        const Outcome outcome = at.group.run(wrong, nullptr, false);
        CHECK(outcome.code == OutcomeCode::mismatch);
        CHECK(outcome.calls.size() == 3 && outcome.calls[0].count == 8 && outcome.calls[1].count == 7);
        for (const float value : values) CHECK(value == 1.0f);
        std::vector<float> again(9000, 1.0f);
        Call right = sum_of(again);
        CHECK(at.group.run(right, nullptr, false).code == OutcomeCode::ok);
        CHECK(again[8999] == 3.0f);
    });
}

// Rank 0 begins the call once rank 1 is waiting, so that only rank 2 is missing.
void a_missing_rank_is_named_after_the_timeout() {
    std::atomic<bool> waits{false};
    std::atomic<int> cause{0};
    with_ranks(3, [&](Rank at) {
        if (at.rank == 2) {
            while (cause < 2) pause(1);
            return;
        }
        if (at.rank == 0)
            while (!waits) pause(1);
        Call call = barrier(at.rank == 0 ? kSecond / 5 : kHung);
        const Interrupted saying = [&] {
            waits = true;
            return false;
        };
        const Outcome outcome = at.group.run(call, saying, false);
        CHECK(outcome.code == OutcomeCode::timed_out);
        CHECK((outcome.missing == std::vector<int>{2}));
        Call later = barrier(kHung);
        CHECK(at.group.run(later, nullptr, false).code == OutcomeCode::timed_out);  // the group is permanently broken
        ++cause;
    });
}

// The first two ranks time out, and then the other ranks begin the call one after another. The last rank reads the
// failure reports of all other ranks.
void a_call_that_failed_on_some_ranks_fails_on_late_ranks() {
    std::atomic<int> called{0};
    with_ranks(4, [&](Rank at) {
        Call first = barrier(kHung);
        CHECK(at.group.run(first, nullptr, false).code == OutcomeCode::ok);
        while (at.rank > 1 && called < at.rank) pause(1);
        Call call = barrier(kSecond);  // long enough for ranks 0 and 1 to begin the call together
        const Outcome outcome = at.group.run(call, nullptr, false);
        CHECK(outcome.code == OutcomeCode::timed_out && !outcome.has_begun);
        CHECK((outcome.missing == std::vector<int>{2, 3}));
        CHECK((outcome.reporter == -1 || outcome.reporter < 2) && (at.rank < 2 || outcome.reporter >= 0));
        ++called;
    });
}

// Returns an `Interrupted` that sets `held` and then blocks its rank until `until` is true.
Interrupted hold_up(std::atomic<bool>& held, const std::atomic<bool>& until) {
    return [&] {
        held = true;
        while (!until) pause(1);
        return false;
    };
}

// After the second call has failed, rank 2 withdraws only its round number for that call. Rank 0 has not yet read rank
// 2's number for the first call and must still be able to complete it.
void a_call_that_others_completed_is_completed_after_they_failed() {
    std::atomic<bool> held{false};
    std::atomic<bool> failed{false};
    with_ranks(3, [&](Rank at) {
        if (at.rank == 1)
            while (!held) pause(1);
        Call first = barrier(kHung);
        CHECK(at.group.run(first, at.rank == 0 ? hold_up(held, failed) : nullptr, false).code == OutcomeCode::ok);
        if (at.rank == 1)
            while (!failed) pause(1);
        Call second = barrier(kSecond / 5);
        CHECK(at.group.run(second, nullptr, false).code == OutcomeCode::timed_out);
        failed = true;
    });
}

void a_rank_that_stops_in_a_call_has_begun_it() {
    std::atomic<bool> held{false};
    std::atomic<bool> failed{false};
    with_ranks(2, [&](Rank at) {
        std::vector<float> values(100'000, 1.0F);
        Call call = sum_of(values);
        if (at.rank == 0) {
            while (!held) pause(1);
            call.timeout_ns = kSecond / 5;
        }
        const Outcome outcome = at.group.run(call, at.rank == 1 ? hold_up(held, failed) : nullptr, false);
        failed = true;
        CHECK(outcome.code == OutcomeCode::timed_out && outcome.has_begun && (outcome.missing == std::vector<int>{1}));
    });
}

void a_rank_that_left_is_named() {
    with_ranks(2, [](Rank at) {
        if (at.rank == 1) return;
        Call call = barrier(kHung);
        const Outcome outcome = at.group.run(call, nullptr, false);
        CHECK(outcome.code == OutcomeCode::peer_lost);
        CHECK((outcome.missing == std::vector<int>{1} && outcome.left == std::vector<int>{1}));
    });
}

void every_rank_receives_its_parts() {
    with_ranks(3, [](Rank at) {
        // In this all_to_all, each rank sends 3000 * (sender + 1) bytes to each rank.
        std::vector<std::vector<std::uint8_t>> out, in;
        Call call;
        call.operation = Operation::all_to_all;
        call.timeout_ns = kHung;
        for (int r = 0; r < 3; ++r) {
            out.emplace_back(3000 * static_cast<std::size_t>(at.rank + 1), static_cast<std::uint8_t>(10 * at.rank + r));
            in.emplace_back(3000 * static_cast<std::size_t>(r + 1), std::uint8_t{0});
        }
        for (std::size_t r = 0; r < 3; ++r) {
            call.inputs.emplace_back(std::vector<ByteRange>{{out[r].data(), out[r].size()}});
            call.outputs.emplace_back(std::vector<ByteRange>{{in[r].data(), in[r].size()}});
        }
        CHECK(at.group.run(call, nullptr, false).code == OutcomeCode::ok);
        for (std::size_t r = 0; r < 3; ++r)
            for (const std::uint8_t byte : in[r]) CHECK(byte == 10 * r + static_cast<std::size_t>(at.rank));
    });
}

void an_abort_ends_the_calls_of_every_rank() {
    std::atomic<int> waiting{0};
    with_ranks(3, [&](Rank at) {
        CHECK(at.group.failure() == OutcomeCode::ok);
        Call call = barrier(kHung);
        if (at.rank == 2) {
            while (waiting != 2) std::this_thread::yield();
            pause(50);  // by then, the other ranks are asleep
            at.group.abort();
        } else {
            ++waiting;
        }
        const auto started = std::chrono::steady_clock::now();
        const Outcome outcome = at.group.run(call, nullptr, false);
        CHECK(std::chrono::steady_clock::now() - started < std::chrono::nanoseconds(kHung / 3));
        CHECK(outcome.code == OutcomeCode::aborted && outcome.reporter == 2);
        Call later = barrier(kHung);
        CHECK(at.group.run(later, nullptr, false).code == OutcomeCode::aborted);
        CHECK(at.group.failure() == OutcomeCode::aborted);
    });
}

void an_abort_on_another_thread_ends_the_own_call() {
    with_ranks(2, [](Rank at) {
        if (at.rank == 1) {  // this rank makes no call, so only the abort can end the other rank's call
            while (at.group.failure() == OutcomeCode::ok) std::this_thread::yield();
            return;
        }
        std::thread aborting([&] {
            pause(50);
            at.group.abort();
        });
        Call call = barrier(kHung);
        const Outcome outcome = at.group.run(call, nullptr, false);
        CHECK(outcome.code == OutcomeCode::aborted && outcome.reporter == 0);
        aborting.join();
    });
}

ByteStream bytes_of(std::vector<float>& values) {
    return ByteStream({{reinterpret_cast<std::uint8_t*>(values.data()), 4 * values.size()}});
}

void calls_without_data_succeed() {
    for (const int n : {1, 2, 3})
        with_ranks(n, [n](Rank at) {
            for (const Operation operation :
                 {Operation::all_reduce, Operation::broadcast, Operation::reduce, Operation::all_gather,
                  Operation::reduce_scatter, Operation::scatter, Operation::all_to_all}) {
                const bool has_inputs = operation == Operation::reduce_scatter || operation == Operation::all_to_all ||
                                        (operation == Operation::scatter && at.rank == 0);
                const bool has_outputs = operation == Operation::all_gather || operation == Operation::all_to_all;
                Call call;
                call.operation = operation;
                call.dtype = DType::f32;
                call.reduce_op = ReduceOp::sum;
                call.root = 0;
                call.timeout_ns = kHung;
                call.inputs.resize(has_inputs ? static_cast<std::size_t>(n) : operation == Operation::all_gather);
                call.outputs.resize(has_outputs ? static_cast<std::size_t>(n) : 1);
                CHECK(at.group.run(call, nullptr, false).code == OutcomeCode::ok);
            }
        });
}

// The rounds of consecutive calls use different parts of the slots, and some calls use a different copy method.
void many_calls_in_a_row_move_the_data_of_their_own() {
    constexpr int kCalls = 150;
    for (const int n : {2, 3, 4})
        with_ranks(n, [n](Rank at) {
            for (int i = 0; i < kCalls; ++i)
                for (const std::size_t count : {512, 700, 1024, 9000}) {
                    std::vector<float> values(count, static_cast<float>(at.rank + i));
                    Call sum = sum_of(values);
                    CHECK(at.group.run(sum, nullptr, false).code == OutcomeCode::ok);
                    const auto expected = static_cast<float>(n * (n - 1) / 2 + n * i);
                    CHECK(std::all_of(values.begin(), values.end(), [=](float each) { return each == expected; }));

                    std::vector<std::vector<float>> gathered(static_cast<std::size_t>(n), std::vector<float>(count));
                    values.assign(count, static_cast<float>(at.rank * i));
                    Call gather;
                    gather.operation = Operation::all_gather;
                    gather.timeout_ns = kHung;
                    gather.inputs.push_back(bytes_of(values));
                    for (std::vector<float>& each : gathered) gather.outputs.push_back(bytes_of(each));
                    CHECK(at.group.run(gather, nullptr, false).code == OutcomeCode::ok);
                    for (int r = 0; r < n; ++r)
                        for (const float each : gathered[static_cast<std::size_t>(r)])
                            CHECK(each == static_cast<float>(r * i));
                }
        });
}

// Only some ranks store the sums that they apply. The longest slices are longer than a slot.
void an_update_is_applied_to_sums_that_are_stored_or_not() {
    for (const int n : {1, 2, 3, 5})
        with_ranks(n, [n](Rank at) {
            for (const std::size_t count : {1, 1023, 1024, 3 * 1024, 3 * 1024 + 1, 50'000}) {
                std::vector<float> mine(count, static_cast<float>(at.rank + 1)), sums(count), params(count, 1.0F);
                update::UpdateOptions plain;
                plain.lr = 1;
                const auto update = std::make_shared<update::Update>(
                    DType::f32, std::vector<update::ParameterRange>{{reinterpret_cast<std::uint8_t*>(params.data()),
                                                                     nullptr, nullptr, nullptr, 4 * count, 0}});
                update->begin({plain});
                Call call;
                call.operation = Operation::reduce_scatter;
                call.dtype = DType::f32;
                call.reduce_op = ReduceOp::sum;
                call.count = count;
                call.timeout_ns = kHung;
                for (int r = 0; r < n; ++r) call.inputs.push_back(bytes_of(mine));
                const bool stores = at.rank % 2 == 0;
                if (stores) call.outputs.push_back(bytes_of(sums));
                call.update = update;
                CHECK(at.group.run(call, nullptr, false).code == OutcomeCode::ok);
                const auto sum = static_cast<float>(n * (n + 1) / 2);
                for (const float param : params) CHECK(param == 1.0F - sum);
                for (const float each : sums) CHECK(each == (stores ? sum : 0.0F));
            }
        });
}

}  // namespace

int main() {
    sums_are_right_for_every_size();
    a_sum_out_of_place_follows_the_tree_and_leaves_its_input();
    sums_in_blocks_have_the_bits_of_those_without();
    a_call_is_made_again_from_the_front();
    an_update_is_applied_to_sums_that_are_stored_or_not();
    a_thread_notifies_once_before_it_waits();
    a_mismatch_fails_equally_and_leaves_the_group_usable();
    a_missing_rank_is_named_after_the_timeout();
    a_call_that_failed_on_some_ranks_fails_on_late_ranks();
    a_call_that_others_completed_is_completed_after_they_failed();
    a_rank_that_stops_in_a_call_has_begun_it();
    a_rank_that_left_is_named();
    every_rank_receives_its_parts();
    calls_without_data_succeed();
    many_calls_in_a_row_move_the_data_of_their_own();
    an_abort_ends_the_calls_of_every_rank();
    an_abort_on_another_thread_ends_the_own_call();
}
