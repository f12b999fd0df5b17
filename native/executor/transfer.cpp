// How the bytes of a schedule's steps get through the lanes, into the tensors and into their reductions.
#include <algorithm>
#include <array>

#include "executor/executor.hpp"

namespace paceline::executor {
namespace {

constexpr std::uint32_t kMagic = 0x504c4332;
constexpr std::size_t kStripe = 256 << 10;   // of a message over several lanes
constexpr std::size_t kStaging = 256 << 10;  // what is received before it is reduced; stays in the cache

std::size_t padding_after(std::size_t nbytes) {
    return (link::kMemoryAlignment - nbytes % link::kMemoryAlignment) % link::kMemoryAlignment;
}

// Where a message dealt out over `lanes` has come to, by what each lane has moved.
template <class LaneStates>
std::size_t contiguous(const LaneStates& states, std::size_t lanes, std::size_t nbytes) {
    if (lanes == 1) return states[0].moved;
    std::size_t end = nbytes;
    for (std::size_t l = 0; l < lanes; ++l) {
        const std::size_t at = (states[l].moved / kStripe * lanes + l) * kStripe + states[l].moved % kStripe;
        end = std::min(end, at);
    }
    return end;
}

}  // namespace

// What a send of no blocks waits for: a barrier consists of nothing but this order.
bool Executor::all_received_before(std::uint32_t step) const {
    for (std::uint32_t earlier = 0; earlier < step; ++earlier)
        if (schedule_->steps[earlier].kind != Kind::send && !ops_[earlier].finished) return false;
    return true;
}

// How far `step` may go, given what the steps before it have done; nullopt: it may not even begin.
std::optional<std::size_t> Executor::limit(std::uint32_t step) const {
    const Op& op = ops_[step];
    const Step& what = schedule_->steps[step];
    if (what.kind == Kind::send && what.from.count == 0)
        return all_received_before(step) ? std::optional(op.nbytes) : std::nullopt;
    std::size_t most = op.nbytes;
    for (const Dependency& on : schedule_->dependencies(step)) {
        const Op& other = ops_[on.step];
        if (other.finished) continue;
        const std::size_t other_from = on.its_to ? other.to : other.from;
        const std::size_t my_from = on.my_to ? op.to : op.from;
        const std::size_t front = other_from + other.done;
        const std::size_t end = std::min(other_from + other.nbytes, my_from + op.nbytes);
        if (front >= end) continue;
        const std::size_t at = std::max(front, std::max(other_from, my_from));
        most = std::min(most, at - my_from);
    }
    // Elements are reduced whole.
    if (most != op.nbytes) most = most / item_ * item_;
    if (most == 0 && op.nbytes != 0) return std::nullopt;
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
        Op& op = ops_[step];
        const Step& what = schedule_->steps[step];
        const std::optional<std::size_t> until = limit(step);
        while (until && op.done < *until) {
            const Piece to = buffer(what.to).run(op.to + op.done, *until - op.done);
            const Piece from = buffer(what.from).run(op.from + op.done, to.nbytes);
            std::memmove(to.data, from.data, from.nbytes);
            op.done += from.nbytes;
            moved = true;
        }
        if (!until || op.done < op.nbytes) return moved;
        finish(op);
        moved = true;
    }
    return moved;
}

void Executor::finish(Op& op) {
    op.finished = true;
    --open_;
}

bool Executor::send(FlowState& state) {
    bool moved = false;
    for (;;) {
        Way& way = state.sending;
        if (way.padding != 0) {
            static const std::array<std::uint8_t, link::kMemoryAlignment> zeros{};
            const Piece piece{const_cast<std::uint8_t*>(zeros.data()), way.padding};
            const std::ptrdiff_t n = (*state.lanes)[0]->write({&piece, 1});
            if (n == link::kClosed) return lost(state.flow->peer), true;
            if (n == 0) return moved;
            way.padding -= static_cast<std::size_t>(n);
            moved = true;
            continue;
        }
        if (way.next == state.flow->sends.size()) return moved;
        const std::uint32_t step = state.flow->sends[way.next];
        Op& op = ops_[step];
        const std::optional<std::size_t> may = limit(step);
        if (!may) return moved;
        const std::size_t until = *may;
        if (way.begun == 0) way.header = {kMagic, step, op.nbytes, header_};

        const Memory& memory = buffer(schedule_->steps[step].from);
        const std::size_t lanes = lanes_for(state, op.nbytes);
        const std::size_t before = op.done;
        bool blocked = false;
        for (std::size_t l = 0; l < lanes && !blocked; ++l) {
            LaneState& lane = way.lanes[l];
            for (;;) {
                std::size_t at = lane.moved;
                std::size_t end = until;
                if (lanes > 1) {
                    at = (lane.moved / kStripe * lanes + l) * kStripe + lane.moved % kStripe;
                    end = std::min(until, at - at % kStripe + kStripe);
                }
                std::array<Piece, link::kMostPieces> pieces;
                std::size_t used = 0;
                std::size_t head = 0;
                if (l == 0 && way.begun < sizeof(Header)) {
                    head = sizeof(Header) - way.begun;
                    pieces[used++] = {reinterpret_cast<std::uint8_t*>(&way.header) + way.begun, head};
                }
                if (at < end) used += memory.slice(op.from + at, end - at, pieces.data() + used, pieces.size() - used);
                if (used == 0) break;
                const std::ptrdiff_t n = (*state.lanes)[l]->write({pieces.data(), used});
                if (n == link::kClosed) return lost(state.flow->peer), true;
                if (n == 0) {
                    blocked = lanes == 1 || way.begun < sizeof(Header);
                    break;
                }
                moved = true;
                const std::size_t of_head = std::min(head, static_cast<std::size_t>(n));
                way.begun += of_head;
                lane.moved += static_cast<std::size_t>(n) - of_head;
            }
        }
        op.done = contiguous(way.lanes, lanes, op.nbytes);
        if (way.begun == sizeof(Header) && op.done == op.nbytes) {
            if ((*state.lanes)[0]->in_memory()) way.padding = padding_after(op.nbytes);
            finish(op);
            ++way.next;
            way.begun = 0;
            for (LaneState& lane : way.lanes) lane.moved = 0;
            continue;
        }
        if (op.done == before) return moved;
    }
}

bool Executor::check_header(FlowState& state, std::uint32_t step) {
    const Header& theirs = state.receiving.header;
    const Op& op = ops_[step];
    if (theirs.magic != kMagic || !is_sound(theirs.call)) {
        lost(state.flow->peer);
        return false;
    }
    messenger_.saw(state.flow->peer, theirs.call);
    if (theirs.call.fits(header_) && theirs.nbytes == op.nbytes) return true;
    Outcome outcome;
    outcome.code = Code::mismatch;
    outcome.calls.resize(static_cast<std::size_t>(links_.size()));
    outcome.calls[static_cast<std::size_t>(links_.rank())] = header_;
    outcome.calls[static_cast<std::size_t>(state.flow->peer)] = theirs.call;
    if (theirs.call.fits(header_)) {
        outcome.split_from = state.flow->peer;
        outcome.split_to = links_.rank();
        outcome.split_sent = theirs.nbytes;
        outcome.split_expected = op.nbytes;
    }
    outcome_ = messenger_.fail(std::move(outcome));
    failed_ = true;
    return false;
}

bool Executor::receive(FlowState& state) {
    bool moved = false;
    for (;;) {
        Way& way = state.receiving;
        link::Lane& first = *(*state.lanes)[0];
        if (way.padding != 0) {
            std::array<std::uint8_t, link::kMemoryAlignment> unused;
            const Piece piece{unused.data(), way.padding};
            const std::ptrdiff_t n = first.read({&piece, 1});
            if (n == link::kClosed) return lost(state.flow->peer), true;
            if (n == 0) return moved;
            way.padding -= static_cast<std::size_t>(n);
            moved = true;
            continue;
        }
        if (way.next == state.flow->receives.size()) return moved;
        const std::uint32_t step = state.flow->receives[way.next];
        Op& op = ops_[step];
        if (way.begun < sizeof(Header)) {
            const Piece piece{reinterpret_cast<std::uint8_t*>(&way.header) + way.begun, sizeof(Header) - way.begun};
            const std::ptrdiff_t n = first.read({&piece, 1});
            if (n == link::kClosed) return lost(state.flow->peer), true;
            if (n == 0) return moved;
            way.begun += static_cast<std::size_t>(n);
            moved = true;
            if (way.begun < sizeof(Header)) continue;
            if (!check_header(state, step)) return true;
        }
        const std::optional<std::size_t> may = limit(step);
        if (!may) return moved;
        const std::size_t until = *may;
        const std::size_t lanes = lanes_for(state, op.nbytes);
        const bool reduces = schedule_->steps[step].kind == Kind::reduce;
        const std::size_t before = op.done;
        for (std::size_t l = 0; l < lanes; ++l) {
            LaneState& lane = way.lanes[l];
            for (;;) {
                std::size_t at = lane.moved;
                std::size_t end = until;
                if (lanes > 1) {
                    at = (lane.moved / kStripe * lanes + l) * kStripe + lane.moved % kStripe;
                    end = std::min(until, at - at % kStripe + kStripe);
                }
                if (at >= end) break;
                const bool went =
                    reduces ? reduce_lane(state, l, step, at, end - at) : receive_lane(state, l, step, at, end - at);
                if (failed_) return true;
                if (!went) break;
                moved = true;
            }
        }
        op.done = contiguous(way.lanes, lanes, op.nbytes);
        if (op.done == op.nbytes) {
            if (first.in_memory()) way.padding = padding_after(op.nbytes);
            finish(op);
            ++way.next;
            way.begun = 0;
            for (LaneState& lane : way.lanes) lane.moved = 0;
            continue;
        }
        if (op.done == before) return moved;
    }
}

bool Executor::receive_lane(FlowState& state, std::size_t lane, std::uint32_t step, std::size_t offset,
                            std::size_t count) {
    const Memory& memory = buffer(schedule_->steps[step].to);
    std::array<Piece, link::kMostPieces> pieces;
    const std::size_t used = memory.slice(ops_[step].to + offset, count, pieces.data(), pieces.size());
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
    const Op& op = ops_[step];
    const ReduceFn kernel = what.final ? reduce_last_ : reduce_;
    for (std::size_t done = 0; done < nbytes;) {
        const Piece to = buffer(what.to).run(op.to + offset + done, nbytes - done);
        const Piece from = buffer(what.from).run(op.from + offset + done, to.nbytes);
        const void* sources[2] = {from.data, received + done};
        kernel(to.data, sources, 2, from.nbytes / item_, links_.size());
        done += from.nbytes;
    }
}

}  // namespace paceline::executor
