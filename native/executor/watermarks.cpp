// Computes which steps in a schedule may advance, and how far (their watermarks).
#include <algorithm>

#include "executor/executor.hpp"

namespace paceline::executor {

// A send without blocks has no data dependencies, so it waits for all earlier receives. A barrier consists entirely of
// such sends.
bool Executor::all_received_before(std::uint32_t step) const {
    for (std::uint32_t earlier = 0; earlier < step; ++earlier)
        if (schedule_->steps[earlier].kind != StepKind::send && !states_[earlier].finished) return false;
    return true;
}

// Returns the position and progress of a step in the buffer that it writes (`dst` is true) or reads.
Executor::Operand Executor::operand(std::uint32_t step, bool dst) const {
    const StepState& state = states_[step];
    const Step& what = schedule_->steps[step];
    const std::size_t offset = dst ? state.dst_offset : state.src_offset;
    const bool packed = converts(what.kind) && dst == (what.kind == StepKind::pack);
    if (!packed) return {offset, state.nbytes, state.done, false};
    const auto size = [&](std::size_t nbytes) { return packed_size(schedule_->wire, nbytes / item_); };
    return {offset, size(state.nbytes), size(state.done), true};
}

// Returns the watermark that `step` may reach now, or nullopt if it may not even begin.
//
// An earlier, unfinished step has processed the bytes of its slice up to its own watermark, `front`, and blocks the
// rest. The slices of both steps are ranges of the same buffer. This step must stop at the first byte, from `front`
// onward, that both slices contain. If there is no such byte, the earlier step does not limit this step. A conversion
// advances by whole groups.
std::optional<std::size_t> Executor::limit(std::uint32_t step) const {
    const StepState& step_state = states_[step];
    const Step& what = schedule_->steps[step];
    if (what.kind == StepKind::send && what.src.length == 0)
        return all_received_before(step) ? std::optional(step_state.nbytes) : std::nullopt;
    std::size_t most = step_state.nbytes;
    for (const Dependency& on : schedule_->dependencies(step)) {
        if (states_[on.step].finished) continue;
        const Operand other = operand(on.step, on.earlier_dst);
        const Operand mine = operand(step, on.later_dst);
        const std::size_t front = other.offset + other.done;
        const std::size_t end = std::min(other.offset + other.nbytes, mine.offset + mine.nbytes);
        if (front >= end) continue;
        const std::size_t at = std::max(front, std::max(other.offset, mine.offset)) - mine.offset;
        most = std::min(most, mine.packed ? at / packed_group(schedule_->wire) * kWireGroup * item_ : at);
    }
    // A stripe or a read may end within an element, and only complete elements can be reduced.
    const std::size_t unit = converts(what.kind) ? kWireGroup * item_ : item_;
    if (most != step_state.nbytes) most = most / unit * unit;
    if (most == 0 && step_state.nbytes != 0) return std::nullopt;
    return most;
}

bool Executor::progress() {
    bool moved = first_local_ < schedule_->local.size() && run_local_steps();
    for (FlowState& state : flows_) {
        if (failed_) return true;
        if (state.sending.next < state.flow->sends.size() || state.sending.padding != 0) moved |= send(state);
        if (failed_) return true;
        if (state.receiving.next < state.flow->receives.size() || state.receiving.padding != 0) moved |= receive(state);
    }
    return moved;
}

void Executor::finish(StepState& step_state) {
    step_state.finished = true;
    --open_;
}

// Finishes a step whose message has been transferred, and proceeds to the next step in the same direction.
void Executor::finish_message(FlowState& state, FlowDirection& direction, StepState& step_state) {
    constexpr std::size_t whole = link::kMemoryAlignment;
    if ((*state.lanes)[0]->is_shared_memory()) direction.padding = (whole - step_state.nbytes % whole) % whole;
    finish(step_state);
    ++direction.next;
    direction.begun = 0;
    for (LaneState& lane : direction.lanes) lane.moved = 0;
}

}  // namespace paceline::executor
