// How the bytes of a schedule's steps get through the lanes, into the tensors and into their reductions.
#include <algorithm>
#include <array>

#include "executor/executor.hpp"

namespace paceline::executor {
namespace {

constexpr std::uint32_t kMagic = 0x504c4332;
// A long message is striped over all lanes to its peer. A stripe is long enough to keep a lane busy between two system
// calls, and short enough that the lanes finish at about the same time.
constexpr std::size_t kStripe = 256 << 10;
constexpr std::size_t kStaging = 256 << 10;  // what is received before it is reduced; stays in the cache

std::size_t padding_after(std::size_t nbytes) {
    return (link::kMemoryAlignment - nbytes % link::kMemoryAlignment) % link::kMemoryAlignment;
}

// The offset in its message of the next byte on lane `lane`, which has transferred `moved` bytes of it so far.
//
// The message is cut into stripes of kStripe bytes, which the lanes take in turns: with three lanes, lane 1 carries
// stripes 1, 4, 7, ... So a lane that has moved `moved` bytes is in the stripe that is the (moved / kStripe)-th of its
// own and the (moved / kStripe * lanes + lane)-th of the message. Sender and receiver both compute this from what they
// have moved, so nothing on the wire says where a byte belongs. With one lane the offset is `moved` itself.
constexpr std::size_t stripe_offset(std::size_t moved, std::size_t lane, std::size_t lanes) {
    return (moved / kStripe * lanes + lane) * kStripe + moved % kStripe;
}

// Where the stripe ends that holds the byte at `offset`: the next byte of the message belongs to another lane.
constexpr std::size_t stripe_end(std::size_t offset) {
    return offset - offset % kStripe + kStripe;
}

// Length of the contiguous prefix transferred so far of a message striped over `lanes`. The lanes advance
// independently, and a later step may use only the bytes that have no gap before them.
template <class LaneStates>
std::size_t contiguous(const LaneStates& states, std::size_t lanes, std::size_t nbytes) {
    if (lanes == 1) return states[0].moved;
    std::size_t end = nbytes;
    for (std::size_t l = 0; l < lanes; ++l) end = std::min(end, stripe_offset(states[l].moved, l, lanes));
    return end;
}

}  // namespace

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

std::size_t Executor::lanes_for(const FlowState& state, std::size_t nbytes) const {
    return nbytes <= kStripe ? 1 : state.lanes->size();
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

bool Executor::send(FlowState& state) {
    bool moved = false;
    for (;;) {
        FlowDirection& direction = state.sending;
        if (direction.padding != 0) {
            static const std::array<std::uint8_t, link::kMemoryAlignment> zeros{};
            const Piece piece{const_cast<std::uint8_t*>(zeros.data()), direction.padding};
            const std::ptrdiff_t n = (*state.lanes)[0]->write({&piece, 1});
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
        if (direction.begun == 0) direction.header = {kMagic, step, step_state.nbytes, header_};

        const Memory& memory = buffer(schedule_->steps[step].src);
        const std::size_t lanes = lanes_for(state, step_state.nbytes);
        const std::size_t before = step_state.done;
        bool blocked = false;
        for (std::size_t l = 0; l < lanes && !blocked; ++l) {
            LaneState& lane = direction.lanes[l];
            for (;;) {
                std::size_t at = lane.moved;
                std::size_t end = until;
                if (lanes > 1) {
                    at = stripe_offset(lane.moved, l, lanes);
                    end = std::min(until, stripe_end(at));
                }
                std::array<Piece, link::kMostPieces> pieces;
                std::size_t used = 0;
                std::size_t head = 0;
                if (l == 0 && direction.begun < sizeof(Header)) {
                    head = sizeof(Header) - direction.begun;
                    pieces[used++] = {reinterpret_cast<std::uint8_t*>(&direction.header) + direction.begun, head};
                }
                if (at < end)
                    used +=
                        memory.slice(step_state.src_offset + at, end - at, pieces.data() + used, pieces.size() - used);
                if (used == 0) break;
                const std::ptrdiff_t n = (*state.lanes)[l]->write({pieces.data(), used});
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
            if ((*state.lanes)[0]->in_memory()) direction.padding = padding_after(step_state.nbytes);
            finish(step_state);
            ++direction.next;
            direction.begun = 0;
            for (LaneState& lane : direction.lanes) lane.moved = 0;
            continue;
        }
        if (step_state.done == before) return moved;
    }
}

bool Executor::check_header(FlowState& state, std::uint32_t step) {
    const Header& theirs = state.receiving.header;
    const StepState& step_state = states_[step];
    if (theirs.magic != kMagic || !is_sound(theirs.call)) {
        lost(state.flow->peer);
        return false;
    }
    messenger_.saw(state.flow->peer, theirs.call);
    if (theirs.call.fits(header_) && theirs.nbytes == step_state.nbytes) return true;
    Outcome outcome;
    outcome.code = Code::mismatch;
    outcome.calls.resize(static_cast<std::size_t>(lanes_.size()));
    outcome.calls[static_cast<std::size_t>(lanes_.rank())] = header_;
    outcome.calls[static_cast<std::size_t>(state.flow->peer)] = theirs.call;
    if (theirs.call.fits(header_)) {
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
            const Piece piece{unused.data(), direction.padding};
            const std::ptrdiff_t n = first.read({&piece, 1});
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
            const Piece piece{reinterpret_cast<std::uint8_t*>(&direction.header) + direction.begun,
                              sizeof(Header) - direction.begun};
            const std::ptrdiff_t n = first.read({&piece, 1});
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
        const std::size_t lanes = lanes_for(state, step_state.nbytes);
        const bool reduces = schedule_->steps[step].kind == Kind::reduce;
        const std::size_t before = step_state.done;
        for (std::size_t l = 0; l < lanes; ++l) {
            LaneState& lane = direction.lanes[l];
            for (;;) {
                std::size_t at = lane.moved;
                std::size_t end = until;
                if (lanes > 1) {
                    at = stripe_offset(lane.moved, l, lanes);
                    end = std::min(until, stripe_end(at));
                }
                if (at >= end) break;
                const bool went =
                    reduces ? reduce_lane(state, l, step, at, end - at) : receive_lane(state, l, step, at, end - at);
                if (failed_) return true;
                if (!went) break;
                moved = true;
            }
        }
        step_state.done = contiguous(direction.lanes, lanes, step_state.nbytes);
        if (step_state.done == step_state.nbytes) {
            if (first.in_memory()) direction.padding = padding_after(step_state.nbytes);
            finish(step_state);
            ++direction.next;
            direction.begun = 0;
            for (LaneState& lane : direction.lanes) lane.moved = 0;
            continue;
        }
        if (step_state.done == before) return moved;
    }
}

bool Executor::receive_lane(FlowState& state, std::size_t lane, std::uint32_t step, std::size_t offset,
                            std::size_t count) {
    const Memory& memory = buffer(schedule_->steps[step].dst);
    std::array<Piece, link::kMostPieces> pieces;
    const std::size_t used = memory.slice(states_[step].dst_offset + offset, count, pieces.data(), pieces.size());
    const std::ptrdiff_t n = (*state.lanes)[lane]->read({pieces.data(), used});
    if (n == link::kClosed) lost(state.flow->peer);
    if (n <= 0) return false;
    state.receiving.lanes[lane].moved += static_cast<std::size_t>(n);
    return true;
}

bool Executor::reduce_lane(FlowState& state, std::size_t lane, std::uint32_t step, std::size_t offset,
                           std::size_t count) {
    link::Lane& from = *(*state.lanes)[lane];
    LaneState& at = state.receiving.lanes[lane];
    if (from.in_memory()) {
        const std::span<const std::uint8_t> there = from.peek();
        const std::size_t whole = std::min(there.size(), count) / item_ * item_;
        if (whole == 0) {
            // Also tells whether the peer is gone.
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
    const Piece piece{at.staging.data() + at.carried, room};
    const std::ptrdiff_t n = from.read({&piece, 1});
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
        const Piece to = buffer(what.dst).run(step_state.dst_offset + offset + done, nbytes - done);
        const Piece from = buffer(what.src).run(step_state.src_offset + offset + done, to.nbytes);
        const void* sources[2] = {from.data, received + done};
        kernel(to.data, sources, 2, from.nbytes / item_, lanes_.size());
        done += from.nbytes;
    }
}

}  // namespace paceline::executor
