// Whom a rank blames when a call takes too long. If ranks have not come to the call, it is they. Otherwise each rank
// asks all others whom they wait for in it, and follows the answers from the ranks that it waits for itself: whoever
// another rank waits for, and does not answer, holds the call up, for instance because its process has been stopped.
#include <algorithm>

#include "executor/executor.hpp"

namespace paceline::executor {
namespace {

using Clock = std::chrono::steady_clock;

// A rank that waits looks for questions in every turn of 20 ms.
constexpr auto kAnswersCome = std::chrono::milliseconds(200);

}  // namespace

void Messenger::ask(std::uint64_t sequence) {
    const std::lock_guard hold(mutex_);
    asked_about_ = sequence;
    for (int peer = 0; peer < lanes_.size(); ++peer) {
        state(peer).awaits.reset();
        if (!lanes_.peer(peer).control) continue;
        push(peer, {.kind = FrameKind::ask, .id = sequence}, {}, nullptr);
        flush(peer);
    }
}

void Messenger::answer(std::uint64_t sequence, const std::vector<int>& ranks) {
    const std::lock_guard hold(mutex_);
    for (int peer = 0; peer < lanes_.size(); ++peer) {
        if (state(peer).asks_about != sequence) continue;
        state(peer).asks_about = 0;
        const std::vector<std::uint8_t> bytes = encode(ranks);
        push(peer, {.kind = FrameKind::answer, .id = sequence, .nbytes = bytes.size()}, bytes, nullptr);
        flush(peer);
    }
}

std::vector<std::optional<std::vector<int>>> Messenger::answers() {
    const std::lock_guard hold(mutex_);
    std::vector<std::optional<std::vector<int>>> answers;
    for (const PeerState& each : states_) answers.push_back(each.awaits);
    return answers;
}

// The ranks that have not come to the call, as far as it is known: those that this rank waits for, or else any if the
// call needs all. In other calls, a rank of which nothing has been heard may have done its part and gone on.
std::vector<int> Executor::absent() const {
    const std::vector<CallHeader> latest = messenger_.latest();
    const auto has_come = [&](int rank) {
        return rank == lanes_.rank() || latest[static_cast<std::size_t>(rank)].sequence >= header_.sequence;
    };
    std::vector<int> ranks = awaited();
    std::erase_if(ranks, has_come);
    if (!ranks.empty() || !needs_all(header_.operation)) return ranks;
    for (int rank = 0; rank < lanes_.size(); ++rank)
        if (!has_come(rank)) ranks.push_back(rank);
    return ranks;
}

// The ranks that hold the call up although nobody is known to be absent; nullopt while answers may still come. If all
// have answered, the call is merely slow, and it is those that this rank waits for.
std::optional<std::vector<int>> Executor::holders_up() {
    if (!asked_at_) {
        asked_at_ = Clock::now();
        messenger_.ask(header_.sequence);
    }
    std::vector<std::optional<std::vector<int>>> answers = messenger_.answers();
    answers[static_cast<std::size_t>(lanes_.rank())] = awaited();
    std::vector<int> reached = {lanes_.rank()};
    std::vector<int> silent;
    for (std::size_t at = 0; at < reached.size(); ++at) {
        const auto& answer = answers[static_cast<std::size_t>(reached[at])];
        if (!answer) {
            silent.push_back(reached[at]);
            continue;
        }
        for (const int rank : *answer)
            if (std::find(reached.begin(), reached.end(), rank) == reached.end()) reached.push_back(rank);
    }
    if (silent.empty()) return awaited();
    if (Clock::now() - *asked_at_ < kAnswersCome) return std::nullopt;
    std::sort(silent.begin(), silent.end());
    return silent;
}

// Names in `outcome` the ranks to blame for a time-out; false while this is not known yet.
bool Executor::blame(Outcome& outcome) {
    outcome.missing = absent();
    if (!outcome.missing.empty()) return true;
    const std::optional<std::vector<int>> silent = holders_up();
    if (!silent) return false;
    const std::vector<CallHeader> latest = messenger_.latest();
    for (const int rank : *silent)
        if (latest[static_cast<std::size_t>(rank)].sequence < header_.sequence) outcome.missing.push_back(rank);
    outcome.came = outcome.missing.empty();
    if (outcome.came) outcome.missing = *silent;
    return true;
}

}  // namespace paceline::executor
