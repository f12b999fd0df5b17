// Tests which calls count as mispredicted: the shortest of twenty calls is compared with the prediction, and a
// misprediction is reported once.
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

void make(PredictionMonitor& monitor, const Call& call, std::int64_t took_ns, std::uint32_t calls) {
    for (std::uint32_t i = 0; i < calls; ++i) monitor.note(call, took_ns);
}

void calls_far_from_their_prediction_are_reported_once() {
    PredictionMonitor monitor;
    make(monitor, predicted(2000), 5000, PredictionMonitor::kCallsPerKind);
    const auto found = monitor.take();
    CHECK(found && found->min_ns == 5000 && found->predicted_ns == 2000 &&
          found->calls == PredictionMonitor::kCallsPerKind);
    CHECK(found->operation == Operation::all_reduce && found->algorithm == 1 && found->count == 8);
    make(monitor, predicted(2000, 16), 5000, PredictionMonitor::kCallsPerKind);
    CHECK(!monitor.take());
}

void calls_that_are_too_fast_are_reported_too() {
    PredictionMonitor monitor;
    make(monitor, predicted(2000), 1000, PredictionMonitor::kCallsPerKind);
    CHECK(monitor.take());
}

void few_calls_and_those_as_predicted_are_not_reported() {
    PredictionMonitor monitor;
    make(monitor, predicted(2000), 5000, PredictionMonitor::kCallsPerKind - 1);
    make(monitor, predicted(2000, 16), 2300, 3 * PredictionMonitor::kCallsPerKind);
    make(monitor, predicted(0, 32), 5000, PredictionMonitor::kCallsPerKind);
    CHECK(!monitor.take());
}

void one_call_in_time_shows_that_the_others_were_waiting() {
    PredictionMonitor monitor;
    make(monitor, predicted(2000), 9000, 10);
    make(monitor, predicted(2000), 2000, 1);
    make(monitor, predicted(2000), 9000, 3 * PredictionMonitor::kCallsPerKind);
    CHECK(!monitor.take());
}

}  // namespace

int main() {
    calls_far_from_their_prediction_are_reported_once();
    calls_that_are_too_fast_are_reported_too();
    few_calls_and_those_as_predicted_are_not_reported();
    one_call_in_time_shows_that_the_others_were_waiting();
}
