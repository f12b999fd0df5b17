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
        fields_.state = record::State::running;
    }
    written_ = recorder->add(fields_, false);
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
    fields_.state = record::State::running;
    written_ = recorder->add(fields_, false);
}

void RecordedCall::start() {
    record::Recorder* const recorder = record::Recorder::active();
    if (recorder == nullptr || !written_) return;
    fields_.started = record::ticks();
    fields_.state = record::State::running;
    recorder->change(written_, fields_, false);
}

void RecordedCall::end(const Observed& observed, const Outcome& outcome) {
    record::Recorder* const recorder = record::Recorder::active();
    if (recorder == nullptr || !written_) return;
    fields_.ended = record::ticks();
    fields_.state = outcome.code == Code::ok ? record::State::done : record::State::failed;
    fields_.outcome = static_cast<std::uint8_t>(outcome.code);
    fields_.shm_nbytes = observed.shm_nbytes;
    fields_.tcp_nbytes = observed.tcp_nbytes;
    fields_.last_arrived = observed.last_arrived;
    // Without a measurement, the last rank is assumed to have arrived just before the call ended.
    if (observed.last_arrived >= 0) fields_.complete = observed.complete != 0 ? observed.complete : fields_.ended;
    if (const auto first = std::min_element(outcome.missing.begin(), outcome.missing.end());
        first != outcome.missing.end()) {
        fields_.first_missing = static_cast<std::uint32_t>(*first);
        for (const int rank : outcome.missing)
            if (rank - *first < kMaxMissing) fields_.missing |= std::uint64_t{1} << (rank - *first);
    }
    recorder->change(written_, fields_, true);
}

}  // namespace paceline
