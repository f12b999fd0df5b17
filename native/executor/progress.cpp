// Which steps of a schedule may go on, and how far: the watermarks.
#include <algorithm>
#include <cstring>

#include "executor/executor.hpp"

namespace paceline::executor {

// A send of no blocks has no bytes to be ordered by, so it waits for all earlier receives instead: a barrier consists
// of nothing but this order.
bool Executor::all_received_before(std::uint32_t step) const {
    for (std::uint32_t earlier = 0; earlier < step; ++earlier)
        if (schedule_->steps[earlier].kind != Kind::send && !states_[earlier].finished) return false;
    return true;
}

// The watermark that `step` may reach now; nullopt when it may not even begin.
//
// An earlier step that is not finished has done the bytes of its slice up to its own watermark, `front`, and blocks the
// rest. Both steps' slices are ranges of the same buffer. Where they overlap, this step may pass the bytes before
// `front` and must stop at the first one behind it. Where they do not, or only before `front`, the earlier step does
// not limit this one.
std::optional<std::size_t> Executor::limit(std::uint32_t step) const {
    const StepState& step_state = states_[step];
    const Step& what = schedule_->steps[step];
    if (what.kind == Kind::send && what.src.length == 0)
        return all_received_before(step) ? std::optional(step_state.nbytes) : std::nullopt;
    std::size_t most = step_state.nbytes;
    for (const Dependency& on : schedule_->dependencies(step)) {
        const StepState& other = states_[on.step];
        if (other.finished) continue;
        const std::size_t other_offset = on.earlier_dst ? other.dst_offset : other.src_offset;
        const std::size_t my_offset = on.later_dst ? step_state.dst_offset : step_state.src_offset;
        const std::size_t front = other_offset + other.done;
        const std::size_t end = std::min(other_offset + other.nbytes, my_offset + step_state.nbytes);
        if (front >= end) continue;
        const std::size_t at = std::max(front, std::max(other_offset, my_offset));
        most = std::min(most, at - my_offset);
    }
    // A stripe or a read may end within an element, which can be reduced only when all of it is there.
    if (most != step_state.nbytes) most = most / item_ * item_;
    if (most == 0 && step_state.nbytes != 0) return std::nullopt;
    return most;
}

bool Executor::progress() {
    bool moved = copied_ < schedule_->copies.size() && copy();
    for (FlowState& state : flows_) {
        if (failed_) return true;
        if (state.sending.next < state.flow->sends.size() || state.sending.padding != 0) moved |= send(state);
        if (failed_) return true;
        if (state.receiving.next < state.flow->receives.size() || state.receiving.padding != 0) moved |= receive(state);
    }
    return moved;
}

bool Executor::copy() {
    bool moved = false;
    for (; copied_ < schedule_->copies.size(); ++copied_) {
        const std::uint32_t step = schedule_->copies[copied_];
        StepState& step_state = states_[step];
        const Step& what = schedule_->steps[step];
        const std::optional<std::size_t> until = limit(step);
        while (until && step_state.done < *until) {
            const Piece to = buffer(what.dst).run(step_state.dst_offset + step_state.done, *until - step_state.done);
            const Piece from = buffer(what.src).run(step_state.src_offset + step_state.done, to.nbytes);
            std::memmove(to.data, from.data, from.nbytes);
            step_state.done += from.nbytes;
            moved = true;
        }
        if (!until || step_state.done < step_state.nbytes) return moved;
        finish(step_state);
        moved = true;
    }
    return moved;
}

void Executor::finish(StepState& step_state) {
    step_state.finished = true;
    --open_;
}

// Finishes a step whose message has been moved, and turns to the next one in the same direction.
void Executor::finish_message(FlowState& state, FlowDirection& direction, StepState& step_state) {
    constexpr std::size_t whole = link::kMemoryAlignment;
    if ((*state.lanes)[0]->in_memory()) direction.padding = (whole - step_state.nbytes % whole) % whole;
    finish(step_state);
    ++direction.next;
    direction.begun = 0;
    for (LaneState& lane : direction.lanes) lane.moved = 0;
}

}  // namespace paceline::executor
