#include "host/group.hpp"

#include <sched.h>

#include <algorithm>
#include <new>

#include "call/poll_interval.hpp"
#include "host/tensor_regions.hpp"
#include "process/cores.hpp"
#include "record/clock.hpp"
#include "shm/futex.hpp"

namespace paceline::host {
namespace {

using Clock = std::chrono::steady_clock;

// A thread spins long enough for a peer that is about to publish, but not long enough to block a peer that needs the
// core. The thread for asynchronous calls competes with the program's threads, so it spins less unless it has its own
// core.
constexpr int kSpins = 4000;
constexpr int kBackgroundSpins = 100;
constexpr int kBriefSpins = 50;  // number of spins in a brief wait, about one or two microseconds
constexpr int kYields = 20;
constexpr double kMaxRanksYielding = 4;  // ranks per core above which yielding takes longer than sleeping
constexpr double kMaxRanksPolling = 8;   // ranks per core above which a wait iteration lasts longer than kPollInterval
constexpr int kMaxPollIntervalFactor = 10;  // in units of kPollInterval
// A yield that took this long gave the core to a computing thread. Yielding again would cost another time slice,
// whereas the scheduler soon runs a thread that is woken from sleep.
constexpr auto kLongYield = std::chrono::microseconds(500);
constexpr std::int64_t kPollIntervalNs = std::chrono::nanoseconds(kPollInterval).count();

std::uint64_t total_nbytes(const std::vector<ByteStream>& streams) {
    std::uint64_t nbytes = 0;
    for (const ByteStream& each : streams) nbytes += each.nbytes();
    return nbytes;
}

}  // namespace

Group::Group(shm::HostMesh& mesh, std::vector<int> members, std::uint64_t id, std::size_t slot_bytes)
    : mesh_(mesh), members_(std::move(members)), id_(id), slot_bytes_(slot_bytes), sleeper_(mesh.changes()) {
    size_ = static_cast<int>(members_.size());
    rank_ = static_cast<int>(std::find(members_.begin(), members_.end(), mesh.rank()) - members_.begin());
    slot_capacity_ = size_ == 2 ? kSlotFactorOfTwoRanks * slot_bytes : slot_bytes;
    sources_.resize(members_.size());
}

std::unique_ptr<Group> Group::create(shm::HostMesh& mesh, std::vector<int> members, std::uint64_t id,
                                     std::size_t slot_bytes, Clock::time_point deadline, int threads,
                                     std::optional<LocalityDomain> domain) {
    std::unique_ptr<Group> group(new Group(mesh, std::move(members), id, slot_bytes));
    const auto ranks = static_cast<std::size_t>(group->size_);
    const std::size_t nbytes = ranks * (kControlBytes + kSlots * group->slot_capacity_);
    auto shared = shm::GroupSegment::open(mesh, group->members_, id, nbytes, deadline);
    if (!shared) return nullptr;
    group->controls_ = shared->data();
    group->slots_ = group->controls_ + ranks * kControlBytes;
    ControlPage* const mine = new (&group->control(group->rank_)) ControlPage;
    mine->cores = usable_cores();
    mine->cores.threads = threads;
    mine->domain = domain ? *domain : domain_of(mine->cores);
    if (!shared->wait_for_all(deadline)) return nullptr;
    group->shared_ = std::move(shared);
    group->configure_for_cores();
    return group;
}

// Chooses how to wait and how to divide reductions into blocks, based on the cores of all ranks.
void Group::configure_for_cores() {
    std::vector<Cores> all_cores;
    std::vector<LocalityDomain> domains;
    for (int r = 0; r < size_; ++r) {
        all_cores.push_back(control(r).cores);
        domains.push_back(control(r).domain);
    }
    const auto mine = static_cast<std::size_t>(rank_);
    const double load = oversubscription(all_cores, mine);
    oversubscribed_ = load > 1;
    yields_ = std::max(1, static_cast<int>(kYields * std::min(1.0, kMaxRanksYielding / load)));
    poll_interval_factor_ =
        static_cast<int>(std::clamp(load / kMaxRanksPolling, 1.0, static_cast<double>(kMaxPollIntervalFactor)));
    has_spare_core_ = paceline::has_spare_core(all_cores, mine, static_cast<std::size_t>(mesh_.size() - size_));
    block_ = reduction_block(domains);
}

Group::~Group() {
    if (is_forked_from_member()) return;
    if (shared_ && !broken_) {
        ControlPage& mine = control(rank_);
        mine.failure_report.cause = mesh_.reported_cause().pack();
        mine.exit_reason.store(ExitReason::left, std::memory_order_release);
        for (Cell& each : mine.cells) shm::futex_wake_all(each.round);
    }
}

// Sets the number of bytes of a slot that each round of the call may use. Small calls rotate through the slot, so that
// bytes have been evicted from the L2 caches by the time a rank writes to them again. This is faster because fetching a
// line from the shared cache is several times as fast as fetching it from another core's cache.
void Group::set_stage_bytes(std::size_t nbytes) {
    stage_bytes_ = staged(nbytes, slot_capacity_);
    stages_per_slot_ = static_cast<std::uint32_t>(slot_capacity_ / stage_bytes_);
}

void Group::publish(std::uint32_t round) {
    Cell& mine = cell(rank_, round);
    // seq_cst, paired with the sleeper's increment and second check in `await_slowly`: at least one side reads the
    // other's store.
    mine.round.store(round, std::memory_order_seq_cst);
    if (control(rank_).sleepers.load(std::memory_order_seq_cst) != 0) shm::futex_wake_all(mine.round);
}

bool Group::await(std::uint32_t round) {
    last_awaited_ = -1;
    for (int step = 1; step < size_; ++step) {
        const int peer = rank_ + step < size_ ? rank_ + step : rank_ + step - size_;
        if (cell(peer, round).round.load(std::memory_order_acquire) == round) continue;
        if (!await_slowly(peer, round)) return false;
        last_awaited_ = peer;
    }
    return true;
}

// Waits for `peer` to publish `round`: spins or yields, then sleeps on the cell's futex repeatedly.
bool Group::await_slowly(int peer, std::uint32_t round) {
    const std::atomic<std::uint32_t>& word = cell(peer, round).round;
    if (oversubscribed_) {
        notify_before_waiting(*call_);
        auto before = Clock::now();
        for (int i = 0; i < yields_; ++i) {
            sched_yield();
            if (word.load(std::memory_order_acquire) == round) return true;
            const auto now = Clock::now();
            if (now - before > kLongYield) break;
            before = now;
        }
    } else {
        const int spins = background_ && !has_spare_core_ ? kBackgroundSpins : kSpins;
        for (int i = 0; i < spins; ++i) {
            shm::cpu_relax();
            if (word.load(std::memory_order_acquire) == round) return true;
            if (i == kBriefSpins) notify_before_waiting(*call_);
        }
    }
    if (!clock_started_) {
        started_ = Clock::now();
        clock_started_ = true;
    }
    std::atomic<std::uint32_t>& sleepers = control(peer).sleepers;
    const auto missing = [&] {
        const RankSet ranks = missing_in(round);
        return ranks.has(peer) ? ranks : RankSet{};
    };
    WaitRegistry::Entry entry;
    search_.reset();
    // If the group has already been aborted, no rank will wake this thread.
    if (aborted_by() >= 0 && !check_events(1, started_, missing, entry)) return false;
    for (int iteration = 1;; ++iteration) {
        sleepers.fetch_add(1, std::memory_order_seq_cst);
        const std::uint32_t seen = word.load(std::memory_order_seq_cst);
        if (seen != round) sleeper_.sleep(word, seen, poll_interval_factor_ * kPollIntervalNs);
        sleepers.fetch_sub(1, std::memory_order_relaxed);
        if (word.load(std::memory_order_acquire) == round) return true;
        if (!check_events(iteration, started_, missing, entry)) return false;
    }
}

// Runs the first round of a call: publishes the header and `payload`, waits for the peers' headers and compares them.
bool Group::begin(Call& call, const void* payload, std::size_t payload_bytes) {
    header_ = {sequence_,        count_in_header(call), call.root,   call.operation, call.dtype, call.reduce_op,
               call.region != 0, call.region,           call.offset, call.algorithm, {}};
    const std::uint32_t round = round_++;
    first_round_ = round;
    Cell& mine = cell(rank_, round);
    mine.header = header_;
    if (payload_bytes != 0) std::memcpy(mine.payload, payload, payload_bytes);
    publish(round);
    if (!await(round)) return false;
    // If this rank had to wait, the last rank that it waited for arrived last. Otherwise, this rank arrived last.
    call.metrics.last_arrived = last_awaited_ >= 0 ? last_awaited_ : rank_;
    if (total_nbytes(call.outputs) > slot_bytes_) call.metrics.complete = record::ticks();
    for (int r = 0; r < size_; ++r)
        if (!cell(r, round).header.matches(header_)) return mismatch(round);
    return true;
}

// Returns the number of bytes that this rank contributes to a call.
std::uint64_t Group::sent_nbytes(const Call& call) const {
    if (call.operation == Operation::broadcast) return rank_ == call.root ? total_nbytes(call.outputs) : 0;
    if (call.operation == Operation::reduce) return rank_ == call.root ? 0 : total_nbytes(call.outputs);
    if (call.operation == Operation::all_reduce) return total_nbytes(call.outputs);
    return total_nbytes(call.inputs);
}

Outcome Group::run(Call& call, const Interrupted& interrupted, bool background) {
    if (broken_) return outcome_;
    if (outcome_.code != OutcomeCode::ok) outcome_ = {};
    // Checks only this rank's own flag. An abort by another rank is detected in the first round of the call.
    if (control(rank_).aborted.load(std::memory_order_acquire) != 0) {
        adopt_abort();
        return outcome_;
    }
    call_ = &call;
    interrupted_ = &interrupted;
    background_ = background;
    timeout_ns_ = call.timeout_ns;
    clock_started_ = false;
    ++sequence_;
    call.metrics.shm_nbytes = sent_nbytes(call);
    slot_copier_.begin(call.operation, call.metrics.shm_nbytes);
    switch (call.operation) {
        case Operation::all_reduce:
            all_reduce(call);
            break;
        case Operation::reduce:
            reduce(call);
            break;
        case Operation::broadcast:
            broadcast(call);
            break;
        case Operation::all_gather:
            gather(call, true);
            break;
        case Operation::gather:
            gather(call, rank_ == call.root);
            break;
        case Operation::reduce_scatter:
            reduce_scatter(call);
            break;
        case Operation::scatter:
            scatter(call);
            break;
        case Operation::all_to_all:
            all_to_all(call);
            break;
        case Operation::barrier:
        case Operation::none:
            begin(call, nullptr, 0);
            break;
    }
    if (outcome_.code == OutcomeCode::ok) {
        slot_copier_.end();
        return {};  // avoids copying the lists in `outcome_`
    }
    if (broken_ && call.region != 0) make_tensor_private(call);
    return outcome_;
}

}  // namespace paceline::host
