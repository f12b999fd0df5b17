// Failures of the executor's calls: mismatches, ranks that died or left, timeouts and interrupts.
#include <algorithm>
#include <thread>

#include "call/poll_interval.hpp"
#include "executor/executor.hpp"

namespace paceline::executor {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kAnnounceInIteration = 1;
constexpr auto kReasonTimeout = std::chrono::milliseconds(200);

}  // namespace

// Fails the call because a lane to `peer` is closed. First waits briefly for a goodbye or a failure report that
// contains the reason. These frames are sent over the control lane and may therefore arrive after another lane has
// closed.
void Executor::lost(int peer) {
    const auto has = [peer](const std::vector<int>& ranks) {
        return std::find(ranks.begin(), ranks.end(), peer) != ranks.end();
    };
    const auto until = Clock::now() + kReasonTimeout;
    for (poll(); !messenger_.failure() && !has(messenger_.left()) && Clock::now() < until; poll())
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    outcome_ = messenger_.fail(messenger_.peer_lost_outcome(peer));
    failed_ = true;
}

std::vector<int> Executor::awaited() const {
    std::vector<int> peers;
    for (const FlowState& state : flows_)
        if (state.receiving.next < state.flow->receives.size() || state.sending.next < state.flow->sends.size())
            peers.push_back(state.flow->peer);
    return peers;
}

// Called after each iteration of the wait loop. Returns false if the call must fail.
bool Executor::check_events(int iteration, const Interrupted& interrupted, bool blocks_program,
                            WaitRegistry::Entry& entry) {
    poll_control_lanes();
    lanes_.meter().measure_if_due(Clock::now());
    if (failed_at_) return true;
    if (iteration == kAnnounceInIteration) messenger_.announce(header_);
    entry.update(lanes_.wait_registry(),
                 {{lanes_.group(), header_.sequence}, blocks_program, lanes_.global_ranks_of(awaited())});
    messenger_.answer();
    if (iteration * kPollInterval > WaitRegistry::kServeDelay) lanes_.wait_registry().serve();
    const std::vector<CallHeader> announced = messenger_.announced();
    Outcome outcome;
    for (std::size_t r = 0; r < announced.size(); ++r) {
        if (announced[r].sequence != header_.sequence || announced[r].matches(header_)) continue;
        outcome.code = OutcomeCode::mismatch;
        outcome.calls = announced;
        outcome.calls[static_cast<std::size_t>(lanes_.rank())] = header_;
    }
    const std::int64_t waited_ns = std::chrono::nanoseconds(Clock::now() - started_).count();
    for (const int peer : awaited()) {
        if (outcome.code != OutcomeCode::ok) break;
        bool silent = iteration % kPollsPerSilenceCheck == 0 && lanes_.peer(peer).control->silent();
        for (const auto& lane : lanes_.peer(peer).bulk)
            silent = silent || (iteration % kPollsPerSilenceCheck == 0 && lane->silent());
        if (!silent) continue;
        outcome.code = OutcomeCode::peer_lost;
        outcome.missing = outcome.gone = {peer};
    }
    if (outcome.code == OutcomeCode::ok && waited_ns > timeout_ns_ && attribute_timeout(outcome, waited_ns)) {
        outcome.code = OutcomeCode::timed_out;
        outcome.calls = messenger_.latest();
    }
    if (outcome.code == OutcomeCode::ok && iteration % kPollsPerInterruptCheck == 0 && interrupted && interrupted()) {
        outcome.code = OutcomeCode::interrupted;
        outcome.missing = absent();
        outcome.has_begun = outcome.missing.empty();
        if (outcome.has_begun) outcome.missing = awaited();
    }
    if (outcome.code == OutcomeCode::ok) return true;
    if (outcome.waited_ns == 0) outcome.waited_ns = waited_ns;
    outcome_ = messenger_.fail(std::move(outcome));
    return false;
}

}  // namespace paceline::executor
