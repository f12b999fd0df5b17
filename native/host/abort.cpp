// Functions that abort a host group or detect that it is broken; any thread may call them while another runs a call.
#include "host/group.hpp"
#include "shm/futex.hpp"

namespace paceline::host {

// Returns a rank that has aborted the group, or -1.
int Group::aborted_by() const {
    for (int r = 0; r < size_; ++r)
        if (control(r).aborted.load(std::memory_order_acquire) != 0) return r;
    return -1;
}

// Fails the call because a rank has aborted the group; always returns false.
bool Group::adopt_abort() {
    outcome_.code = OutcomeCode::aborted;
    outcome_.reporter = aborted_by();
    broken_ = true;
    return false;
}

void Group::abort() {
    if (aborted_by() >= 0) return;  // every rank reports the same aborting rank
    control(rank_).aborted.store(1, std::memory_order_release);
    // A waiting thread sleeps on a cell of this rank or of any other awaited rank, so this function wakes the threads
    // on all cells. A thread that is about to sleep misses the wake-up and detects the abort in its next wait
    // iteration.
    for (int r = 0; r < size_; ++r)
        for (Cell& each : control(r).cells) shm::futex_wake_all(each.round);
}

OutcomeCode Group::failure() {
    for (int r = 0; r < size_; ++r)
        if (const OutcomeCode code = code_of(control(r).exit_reason.load(std::memory_order_acquire));
            code != OutcomeCode::ok)
            return code;
    if (aborted_by() >= 0) return OutcomeCode::aborted;
    return lost().empty() ? OutcomeCode::ok : OutcomeCode::peer_lost;
}

}  // namespace paceline::host
