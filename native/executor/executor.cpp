#include "executor/executor.hpp"

#include <sched.h>

#include <algorithm>
#include <thread>

namespace paceline::executor {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kSpin = std::chrono::microseconds(50);
constexpr auto kBackgroundSpin = std::chrono::microseconds(5);
constexpr int kSliceMs = 20;
constexpr int kSlicesPerInterruptCheck = 5;
constexpr int kSlicesPerSilenceCheck = 25;
constexpr int kAnnounceAtSlice = 1;
constexpr auto kReasonComes = std::chrono::milliseconds(200);
// A rank that has ended the group may have done its part in this call before; what is under way may complete it.
constexpr auto kLastMoves = std::chrono::milliseconds(10);

// Whether a rank's part in the call ends only after every rank has begun its own.
bool needs_all(Operation operation) {
    return operation == Operation::all_reduce || operation == Operation::all_gather ||
           operation == Operation::reduce_scatter || operation == Operation::all_to_all ||
           operation == Operation::barrier;
}

}  // namespace

Executor::Executor(link::Links& links, Messenger& messenger) : links_(links), messenger_(messenger) {
    links_.watch_bulk(waiter_);
    messenger_.on_failure(&waiter_);
}

Executor::~Executor() {
    messenger_.on_failure(nullptr);
}

// Where the slice's blocks lie; nullopt when the call has no such blocks.
std::optional<Executor::Extent> Executor::extent_of(const Slice& slice) const {
    if (slice.count == 0) return Extent{};
    const auto& starts = starts_[static_cast<std::size_t>(slice.buffer)];
    if (starts.size() <= slice.first + slice.count) return std::nullopt;
    return Extent{starts[slice.first], starts[slice.first + slice.count] - starts[slice.first]};
}

// Where the step's slices lie; false when the call lacks what it asks for.
bool Executor::lay_out(const Step& step, Op& op) const {
    const bool writes = step.kind != Kind::send;
    const bool reads = step.kind != Kind::receive;
    const auto to = writes ? extent_of(step.to) : Extent{};
    const auto from = reads ? extent_of(step.from) : Extent{};
    if (!to || !from || (writes && reads && to->nbytes != from->nbytes)) return false;
    op.to = to->from;
    op.from = from->from;
    op.nbytes = writes ? to->nbytes : from->nbytes;
    return step.kind != Kind::reduce || (reduce_ != nullptr && op.nbytes % item_ == 0);
}

// Where each block of each buffer begins, and each step's slices; otherwise the first step that does not fit the call.
std::optional<std::uint32_t> Executor::lay_out(Call& call) {
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
            if (starts.back() != memory.nbytes()) starts = {0};
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
    const std::size_t scratch_bytes =
        scratch_starts[std::min<std::size_t>(schedule_->scratch_blocks, scratch_starts.size() - 1)];
    if (scratch_.size() < scratch_bytes) scratch_.resize(scratch_bytes);
    if (scratch_bytes != 0)
        buffers_[static_cast<std::size_t>(Buffer::scratch)].append(Piece{scratch_.data(), scratch_bytes});

    ops_.assign(schedule_->steps.size(), {});
    for (std::uint32_t i = 0; i < ops_.size(); ++i)
        if (!lay_out(schedule_->steps[i], ops_[i])) return i;
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
    return std::nullopt;
}

// A lane to `peer` has ended. The reason, its goodbye or a verdict, comes over another lane, and perhaps later.
void Executor::lost(int peer) {
    const auto has = [peer](const std::vector<int>& ranks) {
        return std::find(ranks.begin(), ranks.end(), peer) != ranks.end();
    };
    const auto until = Clock::now() + kReasonComes;
    for (poll(); !messenger_.failure() && !has(messenger_.left()) && Clock::now() < until; poll())
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    outcome_ = messenger_.fail(messenger_.without(peer));
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

// Takes in what the others have told.
void Executor::hear() {
    heard_ = links_.news();
    poll();
    if (!broken_at_ && messenger_.failure()) broken_at_ = Clock::now();
}

// What a rank that waits does every slice; false when the call is over that way.
bool Executor::look_around(int slice, const Interrupted& interrupted) {
    hear();
    if (broken_at_) return true;
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
        outcome.calls = messenger_.latest();
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
    broken_at_.reset();
    schedule_ = call.schedule.get();
    timeout_ns_ = call.timeout_ns;
    reduce_last_ = find_reduction(call.dtype, call.reduce_op);
    reduce_ = call.reduce_op == ReduceOp::avg ? find_reduction(call.dtype, ReduceOp::sum) : reduce_last_;
    const bool is_mine = schedule_->rank == links_.rank() && schedule_->size == links_.size();
    if (const auto step = is_mine ? lay_out(call) : std::optional<std::uint32_t>(0)) {
        outcome_.code = Code::unfit;
        outcome_.step = *step;
        return outcome_;
    }
    header_ = {++sequence_, count_in_header(call), call.root, call.operation, call.dtype, call.reduce_op, 0, 0,
               0,           schedule_->algorithm,  {}};

    const auto spin = background ? kBackgroundSpin : kSpin;
    auto idle_since = started_;
    auto looked = started_;
    int slice = 0;
    while (!over()) {
        const bool moved = progress();
        if (failed_) return outcome_;
        const auto now = Clock::now();
        if (broken_at_ && now - *broken_at_ > kLastMoves) return *messenger_.failure();
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
        if (more && progress()) continue;
        const bool news = waiter_.sleep(broken_at_ ? static_cast<int>(kLastMoves.count()) : kSliceMs);
        if (news || links_.news() != heard_) hear();
    }
    if (needs_all(call.operation)) messenger_.saw_all(header_);
    return outcome_;
}

bool Executor::over() const {
    return open_ == 0 && std::all_of(flows_.begin(), flows_.end(), [](const FlowState& state) {
               return state.sending.padding == 0 && state.receiving.padding == 0;
           });
}

}  // namespace paceline::executor
