// Tests which calls are far from their prediction: by the shortest of twenty, and once.
#include "call/prediction_monitor.hpp"

#include "check.hpp"

namespace {

using namespace paceline;

Call predicted(std::int64_t nanoseconds, std::uint64_t count = 8) {
    Call call;
    call.operation = Operation::all_reduce;
    call.algorithm = 1;
    call.count = count;
    call.predicted_ns = nanoseconds;
    return call;
}

void make(Foresight& foresight, const Call& call, std::int64_t took_ns, std::uint32_t calls) {
    for (std::uint32_t i = 0; i < calls; ++i) foresight.note(call, took_ns);
}

void calls_that_are_far_off_are_told_once() {
    Foresight foresight;
    make(foresight, predicted(2000), 5000, Foresight::kCalls);
    const auto found = foresight.take();
    CHECK(found && found->least_ns == 5000 && found->predicted_ns == 2000 && found->calls == Foresight::kCalls);
    CHECK(found->operation == Operation::all_reduce && found->algorithm == 1 && found->count == 8);
    make(foresight, predicted(2000, 16), 5000, Foresight::kCalls);
    CHECK(!foresight.take());
}

void calls_that_are_too_fast_are_told_too() {
    Foresight foresight;
    make(foresight, predicted(2000), 1000, Foresight::kCalls);
    CHECK(foresight.take());
}

void few_calls_and_those_as_predicted_are_not_told() {
    Foresight foresight;
    make(foresight, predicted(2000), 5000, Foresight::kCalls - 1);
    make(foresight, predicted(2000, 16), 2300, 3 * Foresight::kCalls);
    make(foresight, predicted(0, 32), 5000, Foresight::kCalls);
    CHECK(!foresight.take());
}

void one_call_in_time_shows_that_the_others_only_waited() {
    Foresight foresight;
    make(foresight, predicted(2000), 9000, 10);
    make(foresight, predicted(2000), 2000, 1);
    make(foresight, predicted(2000), 9000, 3 * Foresight::kCalls);
    CHECK(!foresight.take());
}

}  // namespace

int main() {
    calls_that_are_far_off_are_told_once();
    calls_that_are_too_fast_are_told_too();
    few_calls_and_those_as_predicted_are_not_told();
    one_call_in_time_shows_that_the_others_only_waited();
}
