#include "call/prediction_monitor.hpp"

#include <algorithm>

namespace paceline {

void Foresight::note(const Call& call, std::int64_t took_ns) {
    if (call.predicted_ns <= 0 || progress_.load(std::memory_order_relaxed) != Progress::watching) return;
    const Kind kind{call.operation, call.algorithm, call.dtype, call.count};
    if (seen_.size() >= kMostKinds && !seen_.contains(kind)) return;
    Seen& seen = seen_[kind];
    seen.least_ns = seen.calls == 0 ? took_ns : std::min(seen.least_ns, took_ns);
    if (++seen.calls != kCalls) return;
    const auto predicted = static_cast<double>(call.predicted_ns);
    const auto least = static_cast<double>(seen.least_ns);
    if (least >= predicted / kFar && least <= predicted * kFar) return;
    surprise_ = {call.operation, call.algorithm, call.dtype, call.count, seen.calls, seen.least_ns, call.predicted_ns};
    progress_.store(Progress::found, std::memory_order_release);
}

std::optional<Surprise> Foresight::take() {
    if (progress_.load(std::memory_order_relaxed) != Progress::found) return std::nullopt;
    Progress found = Progress::found;
    if (!progress_.compare_exchange_strong(found, Progress::told, std::memory_order_acquire)) return std::nullopt;
    return surprise_;
}

}  // namespace paceline
