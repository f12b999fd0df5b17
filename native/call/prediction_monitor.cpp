#include "call/prediction_monitor.hpp"

#include <algorithm>

namespace paceline {

void PredictionMonitor::note(const Call& call, std::int64_t took_ns) {
    if (call.predicted_ns <= 0 || stage_.load(std::memory_order_relaxed) != Stage::watching) return;
    const CallKind call_kind{call.operation, call.algorithm, call.dtype, call.count};
    if (measured_.size() >= kMaxKinds && !measured_.contains(call_kind)) return;
    Measurements& measurements = measured_[call_kind];
    measurements.min_ns = measurements.calls == 0 ? took_ns : std::min(measurements.min_ns, took_ns);
    if (++measurements.calls != kCallsPerKind) return;
    const auto predicted = static_cast<double>(call.predicted_ns);
    const auto shortest = static_cast<double>(measurements.min_ns);
    if (shortest >= predicted / kMaxRatio && shortest <= predicted * kMaxRatio) return;
    prediction_miss_ = {call.operation,     call.algorithm,      call.dtype,       call.count,
                        measurements.calls, measurements.min_ns, call.predicted_ns};
    stage_.store(Stage::found, std::memory_order_release);
}

std::optional<PredictionMiss> PredictionMonitor::take() {
    if (stage_.load(std::memory_order_relaxed) != Stage::found) return std::nullopt;
    Stage found = Stage::found;
    if (!stage_.compare_exchange_strong(found, Stage::reported, std::memory_order_acquire)) return std::nullopt;
    return prediction_miss_;
}

}  // namespace paceline
