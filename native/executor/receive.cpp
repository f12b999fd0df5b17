// Receives a schedule's messages from the lanes, and stores or reduces them into the tensors.
#include <algorithm>
#include <array>
#include <cstring>

#include "executor/executor.hpp"
#include "executor/stripes.hpp"

namespace paceline::executor {
namespace {

constexpr std::size_t kStaging = 256 << 10;  // bytes received before each reduction; small enough for the cache

}  // namespace

bool Executor::check_header(FlowState& state, std::uint32_t step) {
    const Header& theirs = state.receiving.header;
    const StepState& step_state = states_[step];
    if (theirs.magic != Header::kMagic || !is_valid(theirs.call)) {
        lost(state.flow->peer);
        return false;
    }
    messenger_.record_received(state.flow->peer, theirs.call);
    if (theirs.call.matches(header_) && theirs.nbytes == step_state.nbytes) return true;
    Outcome outcome;
    outcome.code = OutcomeCode::mismatch;
    outcome.calls.resize(static_cast<std::size_t>(lanes_.size()));
    // If both ranks were roots of a broadcast, each has completed this call, and receives the other rank's message only
    // in a later call. The message therefore belongs to the call with its number, not to the current one.
    const CallHeader& same = recent_headers_[theirs.call.sequence % recent_headers_.size()];
    const bool differed = same.sequence == theirs.call.sequence && !same.matches(theirs.call);
    outcome.calls[static_cast<std::size_t>(lanes_.rank())] = differed ? same : header_;
    outcome.calls[static_cast<std::size_t>(state.flow->peer)] = theirs.call;
    if (theirs.call.matches(header_)) {
        outcome.split_from = state.flow->peer;
        outcome.split_to = lanes_.rank();
        outcome.split_sent = theirs.nbytes;
        outcome.split_expected = step_state.nbytes;
    }
    outcome_ = messenger_.fail(std::move(outcome));
    failed_ = true;
    return false;
}

bool Executor::receive(FlowState& state) {
    bool moved = false;
    for (;;) {
        FlowDirection& direction = state.receiving;
        link::Lane& first = *(*state.lanes)[0];
        if (direction.padding != 0) {
            std::array<std::uint8_t, link::kMemoryAlignment> unused;
            const ByteRange range{unused.data(), direction.padding};
            const std::ptrdiff_t n = first.read({&range, 1});
            if (n == link::kClosed) return lost(state.flow->peer), true;
            if (n == 0) return moved;
            direction.padding -= static_cast<std::size_t>(n);
            moved = true;
            continue;
        }
        if (direction.next == state.flow->receives.size()) return moved;
        const std::uint32_t step = state.flow->receives[direction.next];
        StepState& step_state = states_[step];
        if (direction.begun < sizeof(Header)) {
            const ByteRange range{reinterpret_cast<std::uint8_t*>(&direction.header) + direction.begun,
                                  sizeof(Header) - direction.begun};
            const std::ptrdiff_t n = first.read({&range, 1});
            if (n == link::kClosed) return lost(state.flow->peer), true;
            if (n == 0) return moved;
            direction.begun += static_cast<std::size_t>(n);
            moved = true;
            if (direction.begun < sizeof(Header)) continue;
            if (!check_header(state, step)) return true;
        }
        const std::optional<std::size_t> may = limit(step);
        if (!may) return moved;
        const std::size_t until = *may;
        const std::size_t lanes = lanes_for(step_state.nbytes, state.lanes->size());
        const bool reduces = schedule_->steps[step].kind == StepKind::reduce;
        const std::size_t before = step_state.done;
        for (std::size_t l = 0; l < lanes; ++l) {
            LaneState& lane = direction.lanes[l];
            for (;;) {
                const auto [from, to] = next_range(lane.moved, l, lanes, until);
                if (from >= to) break;
                const bool went = reduces ? reduce_lane(state, l, step, from, to - from)
                                          : receive_lane(state, l, step, from, to - from);
                if (failed_) return true;
                if (!went) break;
                moved = true;
            }
        }
        step_state.done = contiguous(direction.lanes, lanes, step_state.nbytes);
        if (step_state.done == step_state.nbytes) {
            finish_message(state, direction, step_state);
            continue;
        }
        if (step_state.done == before) return moved;
    }
}

bool Executor::receive_lane(FlowState& state, std::size_t lane, std::uint32_t step, std::size_t offset,
                            std::size_t count) {
    const TensorBytes& memory = buffer(schedule_->steps[step].dst);
    std::array<ByteRange, link::kMaxRanges> ranges;
    const std::size_t used = memory.slice(states_[step].dst_offset + offset, count, ranges.data(), ranges.size());
    const std::ptrdiff_t n = (*state.lanes)[lane]->read({ranges.data(), used});
    if (n == link::kClosed) lost(state.flow->peer);
    if (n <= 0) return false;
    state.receiving.lanes[lane].moved += static_cast<std::size_t>(n);
    return true;
}

bool Executor::reduce_lane(FlowState& state, std::size_t lane, std::uint32_t step, std::size_t offset,
                           std::size_t count) {
    link::Lane& from = *(*state.lanes)[lane];
    LaneState& at = state.receiving.lanes[lane];
    if (from.is_shared_memory()) {
        const std::span<const std::uint8_t> there = from.peek();
        const std::size_t whole = std::min(there.size(), count) / item_ * item_;
        if (whole == 0) {
            // Reading also detects whether the peer has closed the lane.
            if (there.empty() && from.read({}) == link::kClosed) lost(state.flow->peer);
            return false;
        }
        reduce_bytes(step, offset, there.data(), whole);
        from.consume(whole);
        at.moved += whole;
        return true;
    }
    if (at.staging.empty()) at.staging.resize(kStaging);
    const std::size_t room = std::min(kStaging, count) - at.carried;
    const ByteRange range{at.staging.data() + at.carried, room};
    const std::ptrdiff_t n = from.read({&range, 1});
    if (n == link::kClosed) lost(state.flow->peer);
    if (n <= 0) return false;
    const std::size_t have = at.carried + static_cast<std::size_t>(n);
    const std::size_t whole = have / item_ * item_;
    reduce_bytes(step, offset, at.staging.data(), whole);
    at.carried = have - whole;
    if (at.carried != 0) std::memmove(at.staging.data(), at.staging.data() + whole, at.carried);
    at.moved += whole;
    return true;
}

void Executor::reduce_bytes(std::uint32_t step, std::size_t offset, const std::uint8_t* received, std::size_t nbytes) {
    const Step& what = schedule_->steps[step];
    const StepState& step_state = states_[step];
    const ReduceFn kernel = what.final ? reduce_last_ : reduce_;
    for (std::size_t done = 0; done < nbytes;) {
        const ByteRange to = buffer(what.dst).run(step_state.dst_offset + offset + done, nbytes - done);
        const ByteRange from = buffer(what.src).run(step_state.src_offset + offset + done, to.nbytes);
        const void* sources[2] = {from.data, received + done};
        kernel(to.data, sources, 2, from.nbytes / item_, lanes_.size());
        done += from.nbytes;
    }
}

}  // namespace paceline::executor
