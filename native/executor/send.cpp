// Sends a schedule's messages from the tensors into the lanes.
#include <algorithm>
#include <array>

#include "executor/executor.hpp"
#include "executor/stripes.hpp"

namespace paceline::executor {

bool Executor::send(FlowState& state) {
    bool moved = false;
    for (;;) {
        FlowDirection& direction = state.sending;
        if (direction.padding != 0) {
            static const std::array<std::uint8_t, link::kMemoryAlignment> zeros{};
            const ByteRange range{const_cast<std::uint8_t*>(zeros.data()), direction.padding};
            const std::ptrdiff_t n = (*state.lanes)[0]->write({&range, 1});
            if (n == link::kClosed) return lost(state.flow->peer), true;
            if (n == 0) return moved;
            direction.padding -= static_cast<std::size_t>(n);
            moved = true;
            continue;
        }
        if (direction.next == state.flow->sends.size()) return moved;
        const std::uint32_t step = state.flow->sends[direction.next];
        StepState& step_state = states_[step];
        const std::optional<std::size_t> may = limit(step);
        if (!may) return moved;
        const std::size_t until = *may;
        if (direction.begun == 0) direction.header = {Header::kMagic, step, step_state.nbytes, header_};

        const TensorBytes& memory = buffer(schedule_->steps[step].src);
        const std::size_t lanes = lanes_for(step_state.nbytes, state.lanes->size());
        const std::size_t before = step_state.done;
        bool blocked = false;
        for (std::size_t l = 0; l < lanes && !blocked; ++l) {
            LaneState& lane = direction.lanes[l];
            for (;;) {
                const StripeRange next = next_range(lane.moved, l, lanes, until);
                std::array<ByteRange, link::kMaxRanges> ranges;
                std::size_t used = 0;
                std::size_t head = 0;
                if (l == 0 && direction.begun < sizeof(Header)) {
                    head = sizeof(Header) - direction.begun;
                    ranges[used++] = {reinterpret_cast<std::uint8_t*>(&direction.header) + direction.begun, head};
                }
                if (next.from < next.to)
                    used += memory.slice(step_state.src_offset + next.from, next.to - next.from, ranges.data() + used,
                                         ranges.size() - used);
                if (used == 0) break;
                const std::ptrdiff_t n = (*state.lanes)[l]->write({ranges.data(), used});
                if (n == link::kClosed) return lost(state.flow->peer), true;
                if (n == 0) {
                    blocked = lanes == 1 || direction.begun < sizeof(Header);
                    break;
                }
                moved = true;
                const std::size_t of_head = std::min(head, static_cast<std::size_t>(n));
                direction.begun += of_head;
                lane.moved += static_cast<std::size_t>(n) - of_head;
            }
        }
        step_state.done = contiguous(direction.lanes, lanes, step_state.nbytes);
        if (direction.begun == sizeof(Header) && step_state.done == step_state.nbytes) {
            finish_message(state, direction, step_state);
            continue;
        }
        if (step_state.done == before) return moved;
    }
}

}  // namespace paceline::executor
