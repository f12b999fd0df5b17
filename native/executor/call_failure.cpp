// Failures of the executor's calls: mismatches, ranks that died or left, timeouts and interrupts.
#include <algorithm>
#include <thread>

#include "call/poll_interval.hpp"
#include "executor/executor.hpp"

namespace paceline::executor {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kAnnounceInTurn = 1;
constexpr auto kReasonComes = std::chrono::milliseconds(200);

}  // namespace

// Fails the call because a lane to `peer` is closed. Waits briefly for the reason, a goodbye or a verdict, which may
// arrive later because it is sent over the control lane.
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

// Called after each iteration of the wait loop. Returns false if the call must fail.
bool Executor::look_around(int iteration, const Interrupted& interrupted, bool blocks_program, Waits::Entry& entry) {
    hear();
    lanes_.meter().measure_if_due(Clock::now());
    if (broken_at_) return true;
    if (iteration == kAnnounceInTurn) messenger_.announce(header_);
    entry.say(lanes_.waits(), {{lanes_.group(), header_.sequence}, blocks_program, lanes_.names_of(awaited())});
    messenger_.answer();
    if (iteration * kPollInterval > Waits::kServesAfter) lanes_.waits().serve();
    const std::vector<CallHeader> announced = messenger_.announced();
    Outcome outcome;
    for (std::size_t r = 0; r < announced.size(); ++r) {
        if (announced[r].sequence != header_.sequence || announced[r].fits(header_)) continue;
        outcome.code = Code::mismatch;
        outcome.calls = announced;
        outcome.calls[static_cast<std::size_t>(lanes_.rank())] = header_;
    }
    const std::int64_t waited_ns = std::chrono::nanoseconds(Clock::now() - started_).count();
    for (const int peer : awaited()) {
        if (outcome.code != Code::ok) break;
        bool silent = iteration % kPollsPerSilenceCheck == 0 && lanes_.peer(peer).control->silent();
        for (const auto& lane : lanes_.peer(peer).bulk)
            silent = silent || (iteration % kPollsPerSilenceCheck == 0 && lane->silent());
        if (!silent) continue;
        outcome.code = Code::peer_lost;
        outcome.missing = outcome.gone = {peer};
    }
    if (outcome.code == Code::ok && waited_ns > timeout_ns_ && blame(outcome, waited_ns)) {
        outcome.code = Code::timed_out;
        outcome.calls = messenger_.latest();
    }
    if (outcome.code == Code::ok && iteration % kPollsPerInterruptCheck == 0 && interrupted && interrupted()) {
        outcome.code = Code::interrupted;
        outcome.missing = absent();
        outcome.came = outcome.missing.empty();
        if (outcome.came) outcome.missing = awaited();
    }
    if (outcome.code == Code::ok) return true;
    if (outcome.waited_ns == 0) outcome.waited_ns = waited_ns;
    outcome_ = messenger_.fail(std::move(outcome));
    return false;
}

}  // namespace paceline::executor
