#include "executor/executor.hpp"

#include <sched.h>

#include <algorithm>

#include "call/poll_interval.hpp"

namespace paceline::executor {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kBackgroundSpin = std::chrono::microseconds(5);
// The time to wait for data in flight after a rank has left or broken the group. That rank may already have sent all of
// its data for this call.
constexpr auto kDrainTimeout = std::chrono::milliseconds(10);

}  // namespace

Executor::Executor(link::LaneSet& lanes, Messenger& messenger) : lanes_(lanes), messenger_(messenger) {
    lanes_.watch_bulk(waiter_);
    messenger_.on_failure(&waiter_);
}

Executor::~Executor() {
    messenger_.on_failure(nullptr);
}

// Returns the bytes of a slice in its buffer, or nullopt if the call's buffer lacks some of the slice's blocks.
std::optional<Executor::Extent> Executor::extent_of(const Slice& slice) const {
    if (slice.length == 0) return Extent{};
    const auto& starts = starts_[static_cast<std::size_t>(slice.buffer)];
    if (starts.size() <= slice.first + slice.length) return std::nullopt;
    return Extent{starts[slice.first], starts[slice.first + slice.length] - starts[slice.first]};
}

// Returns true if the call's dtype can be packed and the residual, if any, has one value per element.
bool Executor::can_convert(const Step& step, const StepState& step_state) const {
    if (wire_kernels_ == nullptr || step_state.nbytes % item_ != 0) return false;
    if (step.kind != StepKind::pack || residual_ == nullptr) return true;
    return (step_state.src_offset + step_state.nbytes) / item_ <= residual_count_;
}

// Locates the step's slices in the call's buffers; returns false if the call lacks blocks or the reduction that the
// step needs.
bool Executor::place_step(const Step& step, StepState& step_state) const {
    const auto dst = step.writes() ? extent_of(step.dst) : Extent{};
    const auto src = step.reads() ? extent_of(step.src) : Extent{};
    if (!dst || !src) return false;
    step_state.dst_offset = dst->offset;
    step_state.src_offset = src->offset;
    step_state.nbytes = step.writes() && step.kind != StepKind::pack ? dst->nbytes : src->nbytes;
    if (converts(step.kind)) return can_convert(step, step_state);
    if (step.writes() && step.reads() && dst->nbytes != src->nbytes) return false;
    return step.kind != StepKind::reduce || (reduce_ != nullptr && step_state.nbytes % item_ == 0);
}

// Maps the schedule's three buffers to the call's tensors and locates every step in them. Returns the first step that
// does not fit the call; nothing has been sent at that point, so the group remains usable. Schedules are measured in
// blocks, and calls in bytes. For operations on one tensor, `cut` divides the tensor into blocks of equal size or, if
// this is impossible, adds one element to each of the first blocks. Scratch is divided in the same way, so that a block
// fits there. For every other operation, each of the caller's tensors (one, or one per rank) is one block of any size,
// and each scratch block holds `count` elements. `starts_` has an additional last entry, the end of the last block.
std::optional<std::uint32_t> Executor::lay_out_buffers(Call& call) {
    item_ = item_size(call.dtype);
    for (TensorBytes& each : buffers_) each = TensorBytes();
    for (auto& each : starts_) each.clear();
    const bool one_tensor = call.operation == Operation::all_reduce || call.operation == Operation::reduce ||
                            call.operation == Operation::broadcast;
    const std::size_t cut_blocks = std::max<std::size_t>(schedule_->blocks, 1);
    const auto cut = [&](std::vector<std::size_t>& starts) {
        const std::uint64_t each = call.count / cut_blocks;
        const std::uint64_t longer = call.count % cut_blocks;
        for (std::uint64_t b = 0; b <= cut_blocks; ++b) starts.push_back((each * b + std::min(b, longer)) * item_);
    };
    const auto lay = [&](Buffer buffer, const std::vector<ByteStream>& streams) {
        auto& starts = starts_[static_cast<std::size_t>(buffer)];
        TensorBytes& memory = buffers_[static_cast<std::size_t>(buffer)];
        starts.push_back(0);
        for (const ByteStream& stream : streams) {
            memory.append(stream);
            starts.push_back(memory.nbytes());
        }
        if (one_tensor && !streams.empty()) {
            starts.clear();
            cut(starts);
            if (starts.back() != memory.nbytes()) starts = {0};  // no blocks, so a step that uses one does not fit
        }
    };
    // On a rank that is not the root of a reduce, the tensor is the schedule's input and must not be changed.
    const bool reads_only = call.operation == Operation::reduce && lanes_.rank() != call.root;
    lay(Buffer::input, reads_only ? call.outputs : call.inputs);
    lay(Buffer::output, reads_only ? std::vector<ByteStream>{} : call.outputs);

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
        buffers_[static_cast<std::size_t>(Buffer::scratch)].append(ByteRange{scratch_.data(), scratch_bytes});

    states_.assign(schedule_->steps.size(), {});
    if (const auto step = lay_out_wire(call)) return step;
    for (std::uint32_t i = 0; i < states_.size(); ++i)
        if (!place_step(schedule_->steps[i], states_[i])) return i;
    open_ = states_.size();
    first_local_ = 0;

    flows_.resize(schedule_->flows.size());
    for (std::size_t i = 0; i < flows_.size(); ++i) {
        FlowState& state = flows_[i];
        state.flow = &schedule_->flows[i];
        state.lanes = &lanes_.peer(state.flow->peer).bulk;
        for (FlowDirection* direction : {&state.sending, &state.receiving}) {
            direction->next = direction->begun = direction->padding = 0;
            direction->lanes.resize(state.lanes->size());
            for (LaneState& lane : direction->lanes) lane.moved = lane.carried = 0;
        }
    }
    return std::nullopt;
}

// Sets the size of each packed block to the packed size of its floats. Returns the first invalid step. A step is
// invalid if it gives a block a different size than an earlier step did, or converts blocks that the call lacks.
std::optional<std::uint32_t> Executor::lay_out_wire(const Call& call) {
    wire_kernels_ = find_wire_kernels(schedule_->wire, call.dtype);
    auto& starts = starts_[static_cast<std::size_t>(Buffer::wire)];
    starts.assign(schedule_->wire_blocks + 1, 0);
    if (schedule_->wire_blocks == 0) return std::nullopt;
    std::vector<std::optional<std::size_t>> sizes(schedule_->wire_blocks);
    for (const std::uint32_t number : schedule_->local) {
        const Step& step = schedule_->steps[number];
        if (!converts(step.kind)) continue;
        const bool packs = step.kind == StepKind::pack;
        const auto floats = extent_of(packs ? step.src : step.dst);
        if (!floats) return number;
        std::optional<std::size_t>& size = sizes[(packs ? step.dst : step.src).first];
        const std::size_t needed = packed_size(schedule_->wire, floats->nbytes / item_);
        if (size.value_or(needed) != needed) return number;
        size = needed;
    }
    for (std::size_t b = 0; b < sizes.size(); ++b) starts[b + 1] = starts[b] + sizes[b].value_or(0);
    if (wire_room_ < starts.back()) {
        wire_ = std::make_unique_for_overwrite<std::uint8_t[]>(starts.back());
        wire_room_ = starts.back();
    }
    buffers_[static_cast<std::size_t>(Buffer::wire)].append(ByteRange{wire_.get(), starts.back()});
    return std::nullopt;
}

// Adds to `metrics` the numbers of bytes that the schedule sends within this host and to other hosts.
void Executor::observe_traffic(CallMetrics& metrics) {
    for (const Flow& flow : schedule_->flows) {
        std::uint64_t& nbytes = lanes_.peer(flow.peer).mesh_rank >= 0 ? metrics.shm_nbytes : metrics.tcp_nbytes;
        for (const std::uint32_t step : flow.sends) nbytes += states_[step].nbytes;
    }
}

void Executor::poll() {
    last_poll_ = Clock::now();
    messenger_.poll();
}

// Reads the frames that the other ranks have sent on the control lanes.
void Executor::poll_control_lanes() {
    seen_changes_ = lanes_.changes();
    poll();
    if (!failed_at_ && messenger_.failure()) failed_at_ = Clock::now();
}

Outcome Executor::run(Call& call, const Interrupted& interrupted, bool background) {
    started_ = Clock::now();
    // A rank that only sends never waits, so this is its only check for failures.
    if (started_ - last_poll_ > kPollInterval) poll();
    lanes_.meter().measure_if_due(started_);
    if (auto failure = messenger_.failure()) return *failure;
    outcome_ = {};
    failed_ = false;
    failed_at_.reset();
    search_.reset();
    schedule_ = call.schedule.get();
    timeout_ns_ = call.timeout_ns;
    reduce_last_ = find_reduction(call.dtype, call.reduce_op);
    reduce_ = call.reduce_op == ReduceOp::avg ? find_reduction(call.dtype, ReduceOp::sum) : reduce_last_;
    residual_ = call.residual;
    residual_count_ = call.residual_count;
    averages_ = call.reduce_op == ReduceOp::avg;
    const bool is_mine = schedule_->rank == lanes_.rank() && schedule_->size == lanes_.size();
    if (const auto step = is_mine ? lay_out_buffers(call) : std::optional<std::uint32_t>(0)) {
        outcome_.code = OutcomeCode::schedule_unfit;
        outcome_.step = *step;
        return outcome_;
    }
    observe_traffic(call.metrics);
    header_ = {++sequence_, count_in_header(call), call.root, call.operation, call.dtype, call.reduce_op, 0, 0,
               0,           schedule_->algorithm,  {}};
    recent_headers_[sequence_ % recent_headers_.size()] = header_;

    const auto spin = background ? kBackgroundSpin : kMaxSpin;
    auto idle_since = started_;
    auto last_check = started_;
    int iteration = 0;
    WaitRegistry::Entry entry;
    while (!over()) {
        const bool moved = progress();
        if (failed_) return outcome_;
        const auto now = Clock::now();
        if (failed_at_ && now - *failed_at_ > kDrainTimeout) return *messenger_.failure();
        if (now - last_check > kPollInterval) {
            last_check = now;
            if (!check_events(++iteration, interrupted, blocks_program(call, background), entry)) return outcome_;
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
        const bool alerted = waiter_.sleep(failed_at_ ? kDrainTimeout : kPollInterval);
        if (alerted || lanes_.changes() != seen_changes_) poll_control_lanes();
    }
    if (needs_all(call.operation)) messenger_.record_completed(header_);
    return outcome_;
}

OutcomeCode Executor::failure() {
    messenger_.poll();
    const auto failure = messenger_.failure();
    return failure ? failure->code : OutcomeCode::ok;
}

bool Executor::over() const {
    return open_ == 0 && std::all_of(flows_.begin(), flows_.end(), [](const FlowState& state) {
               return state.sending.padding == 0 && state.receiving.padding == 0;
           });
}

}  // namespace paceline::executor
