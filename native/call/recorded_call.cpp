#include "call/recorded_call.hpp"

#include <algorithm>

namespace paceline {
namespace {

constexpr std::uint8_t kSend = 32;
constexpr std::uint8_t kReceive = 33;
constexpr int kMaxMissing = 64;

}  // namespace

void RecordedCall::arrive(std::uint32_t group, const Call& call, std::uint64_t sequence, bool is_async) {
    record::Recorder* const recorder = record::Recorder::active();
    if (recorder == nullptr || group == 0) return;
    fields_.group = group;
    fields_.operation = static_cast<std::uint8_t>(call.operation);
    fields_.dtype = static_cast<std::uint8_t>(call.dtype);
    fields_.reduce_op = static_cast<std::uint8_t>(call.reduce_op);
    fields_.algorithm = call.algorithm;
    fields_.sequence = sequence;
    fields_.count = count_in_header(call);
    fields_.root = call.root;
    fields_.is_async = is_async;
    fields_.predicted_ns = call.predicted_ns;
    fields_.arrived = record::ticks();
    if (!is_async) {
        fields_.started = fields_.arrived;
        fields_.state = record::CallState::running;
    }
    entry_ = recorder->add(fields_, false);
}

void RecordedCall::arrive_message(std::uint32_t group, bool receives, DType dtype, std::uint64_t count, int peer,
                                  std::int32_t tag) {
    record::Recorder* const recorder = record::Recorder::active();
    if (recorder == nullptr || group == 0) return;
    fields_.group = group;
    fields_.operation = receives ? kReceive : kSend;
    fields_.dtype = static_cast<std::uint8_t>(dtype);
    fields_.reduce_op = static_cast<std::uint8_t>(ReduceOp::none);
    fields_.count = count;
    fields_.root = peer;
    fields_.tag = tag;
    fields_.is_async = 1;
    fields_.arrived = fields_.started = record::ticks();
    fields_.state = record::CallState::running;
    entry_ = recorder->add(fields_, false);
}

void RecordedCall::start() {
    record::Recorder* const recorder = record::Recorder::active();
    if (recorder == nullptr || !entry_) return;
    fields_.started = record::ticks();
    fields_.state = record::CallState::running;
    recorder->change(entry_, fields_, false);
}

void RecordedCall::end(const CallMetrics& metrics, const Outcome& outcome) {
    record::Recorder* const recorder = record::Recorder::active();
    if (recorder == nullptr || !entry_) return;
    fields_.ended = record::ticks();
    fields_.state = outcome.code == OutcomeCode::ok ? record::CallState::done : record::CallState::failed;
    fields_.outcome = static_cast<std::uint8_t>(outcome.code);
    fields_.shm_nbytes = metrics.shm_nbytes;
    fields_.tcp_nbytes = metrics.tcp_nbytes;
    fields_.last_arrived = metrics.last_arrived;
    // Without a measurement, the last rank is assumed to have arrived just before the call ended.
    if (metrics.last_arrived >= 0) fields_.complete = metrics.complete != 0 ? metrics.complete : fields_.ended;
    if (const auto first = std::min_element(outcome.missing.begin(), outcome.missing.end());
        first != outcome.missing.end()) {
        fields_.first_missing = static_cast<std::uint32_t>(*first);
        for (const int rank : outcome.missing)
            if (rank - *first < kMaxMissing) fields_.missing |= std::uint64_t{1} << (rank - *first);
    }
    recorder->change(entry_, fields_, true);
}

}  // namespace paceline
