// Failures of calls on one host: mismatches, ranks that died or left, timeouts and interrupts.
#include <algorithm>

#include "call/poll_interval.hpp"
#include "host/group.hpp"
#include "shm/futex.hpp"

namespace paceline::host {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kServeDelayNs = std::chrono::nanoseconds(WaitRegistry::kServeDelay).count();

}  // namespace

// Called after each iteration of the wait loop. Returns false if the call must fail: this rank has failed it or has
// adopted a failure report. `missing` returns the ranks that have not arrived; `since` is the time at which the wait
// began. The function checks for failure reports from other ranks, aborts, ranks that died or left, the deadline and
// interrupts. The order matters because a rank that failed the call or aborted usually leaves soon afterward, and its
// failure report or abort is the more precise reason.
bool Group::check_events(int iteration, Clock::time_point since, const std::function<RankSet()>& missing,
                         WaitRegistry::Entry& entry) {
    const RankSet lost = this->lost();
    const RankSet left = this->left();
    const std::int64_t waited_ns = std::chrono::nanoseconds(Clock::now() - since).count();
    // `missing` must be read after `lost` and `left`, whose acquire loads make visible what a peer published before it
    // exited. In the other order, a peer that completed the round and then left would be reported as missing.
    const RankSet ranks = missing();
    // Failure reports must be read last: a rank that failed the call and then withdrew its round numbers or left would
    // otherwise be reported as missing.
    for (int other = 0; other < size_; ++other)
        if (other != rank_ && adopt_failure_report(other)) return false;
    if (ranks.empty()) return true;
    // The aborting rank may have published the round before it aborted.
    if (aborted_by() >= 0) return missing().empty() || adopt_abort();
    if (!(ranks & (lost | left)).empty()) return fail_peer_lost(ranks, ranks & lost, ranks & left, waited_ns);
    update_wait_entry(ranks, entry);
    if (waited_ns > kServeDelayNs) mesh_.wait_registry().serve();
    if (waited_ns > timeout_ns_)
        if (const auto failure_report = find_timeout_cause(ranks, waited_ns))
            return fail_call(ExitReason::timed_out, *failure_report);
    if (iteration % std::max(1, kPollsPerInterruptCheck / poll_interval_factor_) == 0 && *interrupted_ &&
        (*interrupted_)())
        return fail_call(ExitReason::interrupted,
                         {.missing = ranks, .waited_ns = waited_ns, .has_begun = have_begun(ranks)});
    return true;
}

void Group::update_wait_entry(const RankSet& ranks, WaitRegistry::Entry& entry) const {
    entry.update(mesh_.wait_registry(),
                 {{group_of(id_), sequence_}, blocks_program(*call_, background_), global_ranks_of(ranks.ranks())});
}

// Returns the failure report for a timed-out call that is waiting for `missing`, or nullopt while the responsible ranks
// are unknown.
std::optional<FailureReport> Group::find_timeout_cause(const RankSet& missing, std::int64_t waited_ns) {
    if (!search_) search_.emplace(mesh_.wait_registry(), CallId{group_of(id_), sequence_}, timeout_ns_, waited_ns);
    const std::vector<int> awaited = missing.ranks();
    const auto found = search_->advance(global_ranks_of(awaited));
    if (!found) return std::nullopt;
    std::vector<int> absent;
    for (const int rank : awaited)
        if (!has_begun(rank)) absent.push_back(rank);
    const GroupMembers members{[this](int rank) { return global_rank_of(rank); },
                               [this](int rank) { return has_begun(rank); }, size_};
    Outcome outcome;
    attribute_timeout(outcome, *found, members, std::move(absent), awaited);
    FailureReport failure_report{.waited_ns = search_->waited_ns(), .has_begun = outcome.has_begun};
    for (const int rank : outcome.missing) failure_report.missing.add(rank);
    for (const int rank : outcome.waiting) failure_report.waiting.add(rank);
    for (const int global_rank : outcome.blocked_by)
        if (failure_report.blocked_by_count < kMaxBlockedBy)
            failure_report.blocked_by[failure_report.blocked_by_count++] = global_rank;
    failure_report.cause = cause_of_timeout(outcome, members).pack();
    return failure_report;
}

int Group::global_rank_of(int rank) const {
    return mesh_.global_rank(members_[static_cast<std::size_t>(rank)]);
}

std::vector<int> Group::global_ranks_of(const std::vector<int>& ranks) const {
    std::vector<int> global_ranks;
    for (const int rank : ranks) global_ranks.push_back(global_rank_of(rank));
    return global_ranks;
}

// Returns the members that died.
RankSet Group::lost() const {
    RankSet ranks;
    for (int r = 0; r < size_; ++r)
        if (mesh_.has_died(members_[static_cast<std::size_t>(r)])) ranks.add(r);
    return ranks;
}

// Returns the members that left the job or destroyed this group.
RankSet Group::left() const {
    RankSet ranks;
    for (int r = 0; r < size_; ++r)
        if (r != rank_ && (mesh_.has_left(members_[static_cast<std::size_t>(r)]) ||
                           control(r).exit_reason.load(std::memory_order_acquire) == ExitReason::left))
            ranks.add(r);
    return ranks;
}

RankSet Group::missing_in(std::uint32_t round) const {
    RankSet ranks;
    for (int r = 0; r < size_; ++r)
        if (r != rank_ && cell(r, round).round.load(std::memory_order_acquire) != round) ranks.add(r);
    return ranks;
}

// Returns true if `rank` has begun the call in which this rank is waiting.
bool Group::has_begun(int rank) const {
    return std::any_of(std::begin(control(rank).cells), std::end(control(rank).cells),
                       [this](const Cell& cell) { return cell.header.sequence >= sequence_; });
}

bool Group::have_begun(const RankSet& ranks) const {
    const std::vector<int> all = ranks.ranks();
    return std::all_of(all.begin(), all.end(), [this](int rank) { return has_begun(rank); });
}

// Returns the cause, if any, that `rank` reported to the group, or to the mesh when it left the mesh.
FailureCause Group::cause_of(int rank) const {
    const ControlPage& theirs = control(rank);
    if (theirs.exit_reason.load(std::memory_order_acquire) == ExitReason::left && theirs.failure_report.cause != 0)
        return FailureCause::unpack(theirs.failure_report.cause);
    return mesh_.cause_reported_by(members_[static_cast<std::size_t>(rank)]);
}

// Fails the call because ranks died or left. Reports dead ranks in preference to ranks that left, and ranks that
// reported no cause in preference to ranks that failed the call because of another rank.
bool Group::fail_peer_lost(const RankSet& missing, const RankSet& lost, const RankSet& left, std::int64_t waited_ns) {
    const RankSet& gone = lost.empty() ? left : lost;
    RankSet first;
    for (const int r : gone.ranks())
        if (!cause_of(r).known()) first.add(r);
    const RankSet& named = first.empty() ? gone : first;
    const FailureCause cause = first.empty() ? cause_of(gone.first()) : FailureCause{};
    return fail_call(ExitReason::peer_lost, {.missing = missing,
                                             .gone = named,
                                             .left = lost.empty() ? named : RankSet{},
                                             .waited_ns = waited_ns,
                                             .cause = cause.pack()});
}

bool Group::fail_call(ExitReason reason, const FailureReport& failure_report) {
    outcome_.code = code_of(reason);
    outcome_.missing = failure_report.missing.ranks();
    outcome_.gone = failure_report.gone.ranks();
    outcome_.left = failure_report.left.ranks();
    outcome_.waiting = failure_report.waiting.ranks();
    outcome_.blocked_by.assign(failure_report.blocked_by,
                               failure_report.blocked_by + std::min(failure_report.blocked_by_count, kMaxBlockedBy));
    outcome_.cause = FailureCause::unpack(failure_report.cause);
    outcome_.waited_ns = failure_report.waited_ns;
    // A missing rank's latest call shows which call it made instead.
    outcome_.calls.resize(static_cast<std::size_t>(size_));
    for (int r = 0; r < size_; ++r) {
        CallHeader& latest = outcome_.calls[static_cast<std::size_t>(r)];
        for (std::uint32_t at = 0; at < kSlots; ++at) {
            const CallHeader& header = control(r).cells[at].header;
            if (header.sequence > latest.sequence) latest = header;
        }
    }
    outcome_.has_begun = failure_report.has_begun;
    broken_ = true;
    ControlPage& mine = control(rank_);
    mine.failure_report = failure_report;
    mine.exit_reason.store(reason, std::memory_order_release);
    withdraw_rounds();
    const FailureCause cause = cause_of_leaving(outcome_, mesh_.wait_registry().global_rank(),
                                                [this](int rank) { return global_rank_of(rank); });
    if (cause.known()) mesh_.report_cause(cause);
    return false;
}

// Withdraws the round numbers of the failed call from this rank's cells. A rank that begins the call later then reads
// the failure report and fails as well. The numbers of earlier calls stay, because those calls have completed.
void Group::withdraw_rounds() {
    for (Cell& each : control(rank_).cells) {
        const std::uint32_t round = each.round.load(std::memory_order_relaxed);
        // `round + 1` belongs to the next cell, so no rank waits for it in this cell. A rank that reads it also sees
        // the failure report.
        if (static_cast<std::int32_t>(round - first_round_) >= 0)
            each.round.store(round + 1, std::memory_order_release);
        shm::futex_wake_all(each.round);
    }
}

// Adopts the failure report of `peer` if that rank failed the call; returns false if it did not.
bool Group::adopt_failure_report(int peer) {
    const ControlPage& theirs = control(peer);
    const ExitReason reason = theirs.exit_reason.load(std::memory_order_acquire);
    if (reason == ExitReason::none || reason == ExitReason::left) return false;
    outcome_.reporter = peer;
    fail_call(reason, theirs.failure_report);
    return true;
}

bool Group::mismatch(std::uint32_t round) {
    outcome_.code = OutcomeCode::mismatch;
    outcome_.calls.resize(static_cast<std::size_t>(size_));
    for (int r = 0; r < size_; ++r) outcome_.calls[static_cast<std::size_t>(r)] = cell(r, round).header;
    return false;
}

}  // namespace paceline::host
