// Functions with which any thread aborts a host group, or detects that it is broken, while another thread runs a call.
#include "host/group.hpp"
#include "shm/futex.hpp"

namespace paceline::host {

// Returns a rank that has aborted the group, or -1.
int Group::aborted_by() const {
    for (int r = 0; r < size_; ++r)
        if (control(r).aborted.load(std::memory_order_acquire) != 0) return r;
    return -1;
}

// Ends the call because a rank has aborted the group; returns false, as `give_up` does.
bool Group::adopt_abort() {
    outcome_.code = Code::aborted;
    outcome_.reporter = aborted_by();
    broken_ = true;
    return false;
}

void Group::abort() {
    if (aborted_by() >= 0) return;  // so that every rank names the first rank that aborted
    control(rank_).aborted.store(1, std::memory_order_release);
    // A waiting thread sleeps on a cell of any of the ranks for which it waits. A thread that is about to sleep misses
    // this wake-up and checks after its turn.
    for (int r = 0; r < size_; ++r)
        for (Cell& each : control(r).cells) shm::futex_wake_all(each.round);
}

Code Group::failure() {
    for (int r = 0; r < size_; ++r)
        if (const Code code = code_of(control(r).gave_up.load(std::memory_order_acquire)); code != Code::ok)
            return code;
    if (aborted_by() >= 0) return Code::aborted;
    return lost().empty() ? Code::ok : Code::peer_lost;
}

}  // namespace paceline::host
