#include "executor/executor.hpp"

#include <sched.h>

#include <algorithm>
#include <array>
#include <thread>

namespace paceline::executor {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint32_t kMagic = 0x504c4332;
constexpr std::size_t kStripe = 256 << 10;   // of a message over several lanes
constexpr std::size_t kStaging = 256 << 10;  // what is received before it is reduced; stays in the cache
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr auto kBackgroundSpin = std::chrono::microseconds(5);
constexpr int kSliceMs = 20;
constexpr int kSlicesPerInterruptCheck = 5;
constexpr int kSlicesPerSilenceCheck = 25;
constexpr int kAnnounceAtSlice = 1;
constexpr auto kReasonComes = std::chrono::milliseconds(200);

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

Executor::Executor(link::Links& links, Messenger& messenger) : links_(links), messenger_(messenger) {
    links_.watch_bulk(waiter_);
}

std::size_t Executor::offset_of(Buffer buffer, std::uint32_t block) const {
    return starts_[static_cast<std::size_t>(buffer)][block];
}

// Where each block of each buffer begins, and each step's slices.
void Executor::lay_out(Call& call) {
    item_ = item_size(call.dtype);
    for (Memory& each : buffers_) each = Memory();
    for (auto& each : starts_) each.clear();
    const bool one_tensor = call.operation == Operation::all_reduce || call.operation == Operation::reduce ||
                            call.operation == Operation::broadcast;
    const std::size_t cut_blocks = std::max<std::size_t>(schedule_->blocks, 1);
    const auto cut = [&](std::vector<std::size_t>& starts) {
        const std::uint64_t each = call.count / cut_blocks;
        const std::uint64_t longer = call.count % cut_blocks;
        for (std::uint64_t b = 0; b <= cut_blocks; ++b) starts.push_back((each * b + std::min(b, longer)) * item_);
    };
    const auto lay = [&](Buffer buffer, const std::vector<Stream>& streams) {
        auto& starts = starts_[static_cast<std::size_t>(buffer)];
        Memory& memory = buffers_[static_cast<std::size_t>(buffer)];
        starts.push_back(0);
        for (const Stream& stream : streams) {
            memory.append(stream);
            starts.push_back(memory.nbytes());
        }
        if (one_tensor && !streams.empty()) {
            starts.clear();
            cut(starts);
        }
    };
    // A rank that reduces for another must not change its own tensor: it is an input there.
    const bool reads_only = call.operation == Operation::reduce && links_.rank() != call.root;
    lay(Buffer::input, reads_only ? call.outputs : call.inputs);
    lay(Buffer::output, reads_only ? std::vector<Stream>{} : call.outputs);

    auto& scratch_starts = starts_[static_cast<std::size_t>(Buffer::scratch)];
    if (one_tensor) {
        cut(scratch_starts);
    } else {
        for (std::size_t b = 0; b <= schedule_->scratch_blocks; ++b) scratch_starts.push_back(b * call.count * item_);
    }
    const std::size_t scratch_bytes = schedule_->scratch_blocks == 0 ? 0 : scratch_starts[schedule_->scratch_blocks];
    if (scratch_.size() < scratch_bytes) scratch_.resize(scratch_bytes);
    if (scratch_bytes != 0)
        buffers_[static_cast<std::size_t>(Buffer::scratch)].append(Piece{scratch_.data(), scratch_bytes});

    ops_.assign(schedule_->steps.size(), {});
    for (std::size_t i = 0; i < ops_.size(); ++i) {
        const Step& step = schedule_->steps[i];
        Op& op = ops_[i];
        const bool writes = step.kind != Kind::send;
        const Slice& sized = writes ? step.to : step.from;
        if (writes && step.to.count != 0) op.to = offset_of(step.to.buffer, step.to.first);
        if (step.kind != Kind::receive && step.from.count != 0) op.from = offset_of(step.from.buffer, step.from.first);
        if (sized.count != 0)
            op.nbytes = offset_of(sized.buffer, sized.first + sized.count) - offset_of(sized.buffer, sized.first);
    }
    open_ = ops_.size();
    copied_ = 0;

    flows_.resize(schedule_->flows.size());
    for (std::size_t i = 0; i < flows_.size(); ++i) {
        FlowState& state = flows_[i];
        state.flow = &schedule_->flows[i];
        state.lanes = &links_.peer(state.flow->peer).bulk;
        for (Way* way : {&state.sending, &state.receiving}) {
            way->next = way->begun = way->padding = 0;
            way->lanes.resize(state.lanes->size());
            for (LaneState& lane : way->lanes) lane.moved = lane.carried = 0;
        }
    }
}

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

// A lane to `peer` has ended. The reason, its goodbye or a verdict, comes over another lane, and perhaps later.
void Executor::lost(int peer) {
    const auto has = [peer](const std::vector<int>& ranks) {
        return std::find(ranks.begin(), ranks.end(), peer) != ranks.end();
    };
    const auto until = Clock::now() + kReasonComes;
    for (poll(); !messenger_.failure() && !has(messenger_.left()) && Clock::now() < until; poll())
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    Outcome outcome;
    outcome.code = Code::peer_lost;
    outcome.missing = outcome.gone = {peer};
    if (has(messenger_.left())) outcome.left = {peer};
    outcome_ = messenger_.fail(std::move(outcome));
    failed_ = true;
}

std::vector<int> Executor::awaited() const {
    std::vector<int> peers;
    for (const FlowState& state : flows_)
        if (state.receiving.next < state.flow->receives.size() || state.sending.next < state.flow->sends.size())
            peers.push_back(state.flow->peer);
    return peers;
}

// Whom to blame that a call takes too long. Who has not told of this call may have done its part long ago; whoever is
// awaited right here has not.
std::vector<int> Executor::missing(const std::vector<CallHeader>& announced) const {
    const auto has_come = [&](int rank) {
        return rank == links_.rank() || announced[static_cast<std::size_t>(rank)].sequence >= header_.sequence;
    };
    const std::vector<int> here = awaited();
    std::vector<int> ranks = here;
    std::erase_if(ranks, has_come);
    if (!ranks.empty()) return ranks;
    for (int rank = 0; rank < links_.size(); ++rank)
        if (!has_come(rank)) ranks.push_back(rank);
    return ranks.empty() ? here : ranks;
}

void Executor::poll() {
    polled_ = Clock::now();
    messenger_.poll();
}

// What a rank that waits does every slice; false when the call is over that way.
bool Executor::look_around(int slice, const Interrupted& interrupted) {
    poll();
    if (auto failure = messenger_.failure()) {
        outcome_ = std::move(*failure);
        return false;
    }
    if (slice == kAnnounceAtSlice) messenger_.announce(header_);
    const std::vector<CallHeader> announced = messenger_.announced();
    Outcome outcome;
    for (std::size_t r = 0; r < announced.size(); ++r) {
        if (announced[r].sequence != header_.sequence || announced[r].fits(header_)) continue;
        outcome.code = Code::mismatch;
        outcome.calls = announced;
        outcome.calls[static_cast<std::size_t>(links_.rank())] = header_;
    }
    const std::int64_t waited_ns = std::chrono::nanoseconds(Clock::now() - started_).count();
    const std::vector<int> left = messenger_.left();
    for (const int peer : awaited()) {
        if (outcome.code != Code::ok) break;
        bool gone = slice % kSlicesPerSilenceCheck == 0 && links_.peer(peer).control->silent();
        for (const auto& lane : links_.peer(peer).bulk)
            gone = gone || (slice % kSlicesPerSilenceCheck == 0 && lane->silent());
        if (!gone) continue;
        outcome.code = Code::peer_lost;
        outcome.missing = outcome.gone = {peer};
    }
    if (outcome.code == Code::ok && waited_ns > timeout_ns_) {
        outcome.code = Code::timed_out;
        outcome.missing = missing(announced);
        outcome.calls = announced;
    }
    if (outcome.code == Code::ok && slice % kSlicesPerInterruptCheck == 0 && interrupted && interrupted()) {
        outcome.code = Code::interrupted;
        outcome.missing = awaited();
    }
    if (outcome.code == Code::ok) return true;
    outcome.waited_ns = waited_ns;
    outcome_ = messenger_.fail(std::move(outcome));
    return false;
}

Outcome Executor::run(Call& call, const Interrupted& interrupted, bool background) {
    started_ = Clock::now();
    // Who only sends never waits, and hears here what the others had to say.
    if (started_ - polled_ > std::chrono::milliseconds(kSliceMs)) poll();
    if (auto failure = messenger_.failure()) return *failure;
    outcome_ = {};
    failed_ = false;
    schedule_ = call.schedule.get();
    timeout_ns_ = call.timeout_ns;
    header_ = {++sequence_, call.count, call.root, call.operation,       call.dtype, call.reduce_op,
               0,           0,          0,         schedule_->algorithm, {}};
    reduce_last_ = find_reduction(call.dtype, call.reduce_op);
    reduce_ = call.reduce_op == ReduceOp::avg ? find_reduction(call.dtype, ReduceOp::sum) : reduce_last_;
    lay_out(call);

    const auto spin = background ? kBackgroundSpin : kSpin;
    auto idle_since = started_;
    auto looked = started_;
    int slice = 0;
    while (!over()) {
        const bool moved = progress();
        if (failed_) return outcome_;
        const auto now = Clock::now();
        if (now - looked > std::chrono::milliseconds(kSliceMs)) {
            looked = now;
            if (!look_around(++slice, interrupted)) return outcome_;
        }
        if (moved) {
            idle_since = now;
            continue;
        }
        if (now - idle_since < spin) {
            sched_yield();
            continue;
        }
        bool more = false;
        for (const FlowState& state : flows_)
            for (const auto& lane : *state.lanes) more |= lane->arm();
        if (!more || !progress()) waiter_.sleep(kSliceMs);
    }
    return outcome_;
}

bool Executor::over() const {
    return open_ == 0 && std::all_of(flows_.begin(), flows_.end(), [](const FlowState& state) {
               return state.sending.padding == 0 && state.receiving.padding == 0;
           });
}

}  // namespace paceline::executor
