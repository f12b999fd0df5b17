// The steps that do not involve other ranks: copies, and conversions of blocks to and from the wire format between
// hosts.
#include <algorithm>
#include <cstring>

#include "executor/executor.hpp"

namespace paceline::executor {
namespace {

// The size, in bytes, of the floats to convert before driving the lanes again. It is small enough that packed or
// received data stays in the cache and that socket buffers do not run empty.
constexpr std::size_t kAtATime = 128 << 10;

}  // namespace

// Advances each local step as far as possible.
bool Executor::run_local_steps() {
    bool moved = false;
    const std::vector<std::uint32_t>& local = schedule_->local;
    for (std::size_t at = first_local_; at < local.size(); ++at) {
        StepState& step_state = states_[local[at]];
        if (!step_state.finished) {
            if (const std::optional<std::size_t> until = limit(local[at])) {
                const bool is_copy = schedule_->steps[local[at]].kind == StepKind::copy;
                moved |= is_copy ? copy(local[at], *until) : convert(local[at], *until);
                if (step_state.done == step_state.nbytes) {
                    finish(step_state);
                    moved = true;
                }
            }
        }
        if (at == first_local_ && step_state.finished) ++first_local_;
    }
    return moved;
}

bool Executor::copy(std::uint32_t step, std::size_t until) {
    StepState& step_state = states_[step];
    const Step& what = schedule_->steps[step];
    const bool moves = step_state.done < until;
    while (step_state.done < until) {
        const ByteRange to = buffer(what.dst).run(step_state.dst_offset + step_state.done, until - step_state.done);
        const ByteRange from = buffer(what.src).run(step_state.src_offset + step_state.done, to.nbytes);
        std::memmove(to.data, from.data, from.nbytes);
        step_state.done += from.nbytes;
    }
    return moves;
}

// Converts at most kAtATime bytes of floats, up to `until`, which is the end of the block or of a group.
bool Executor::convert(std::uint32_t step, std::size_t until) {
    StepState& step_state = states_[step];
    const Step& what = schedule_->steps[step];
    const std::size_t group = kWireGroup * item_;
    const bool packs = what.kind == StepKind::pack;
    const TensorBytes& floats = buffer(packs ? what.src : what.dst);
    const std::size_t offset = packs ? step_state.src_offset : step_state.dst_offset;
    until = std::min(until, step_state.done + kAtATime);
    const bool moves = step_state.done < until;
    while (step_state.done < until) {
        const std::size_t left = until - step_state.done;
        const ByteRange run = floats.run(offset + step_state.done, left);
        const std::size_t whole = run.nbytes == left ? left : run.nbytes / group * group;
        if (whole != 0)
            convert_run(step, run.data, whole);
        else
            convert_split_group(step, floats, offset + step_state.done, std::min(group, left));
        step_state.done += whole != 0 ? whole : std::min(group, left);
    }
    return moves;
}

// Converts the step's next floats, which are at `floats`.
void Executor::convert_run(std::uint32_t step, std::uint8_t* floats, std::size_t nbytes) {
    const StepState& step_state = states_[step];
    const Step& what = schedule_->steps[step];
    const std::size_t count = nbytes / item_;
    const std::size_t packed_done = packed_size(schedule_->wire, step_state.done / item_);
    if (what.kind == StepKind::pack) {
        const std::size_t element = (step_state.src_offset + step_state.done) / item_;
        wire_kernels_->pack(floats, residual_ == nullptr ? nullptr : residual_ + element,
                            wire_.get() + step_state.dst_offset + packed_done, count);
        return;
    }
    const std::uint8_t* packed = wire_.get() + step_state.src_offset + packed_done;
    if (what.kind == StepKind::unpack)
        wire_kernels_->unpack(packed, floats, count);
    else
        wire_kernels_->add(packed, floats, count, what.final && averages_ ? lanes_.size() : 1);
}

// Converts a group that spans several tensors, using a contiguous copy.
void Executor::convert_split_group(std::uint32_t step, const TensorBytes& floats, std::size_t at, std::size_t nbytes) {
    alignas(8) std::uint8_t group[kWireGroup * sizeof(float)];
    const auto each_piece = [&](auto visit) {
        for (std::size_t done = 0; done < nbytes;) {
            const ByteRange range = floats.run(at + done, nbytes - done);
            visit(range, group + done);
            done += range.nbytes;
        }
    };
    each_piece([](const ByteRange& range, std::uint8_t* copy) { std::memcpy(copy, range.data, range.nbytes); });
    convert_run(step, group, nbytes);
    if (schedule_->steps[step].kind == StepKind::pack) return;
    each_piece([](const ByteRange& range, const std::uint8_t* copy) { std::memcpy(range.data, copy, range.nbytes); });
}

}  // namespace paceline::executor
