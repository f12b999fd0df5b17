// Striping of a long message over the lanes to its peer.
//
// The message is cut into stripes of kStripe bytes, which are assigned to the lanes in rotation: with three lanes, lane
// 1 carries stripes 1, 4, 7, ... Sender and receiver both compute the offset of a lane's next byte from the number of
// bytes that the lane has moved; the offset is not transmitted. A message of one stripe or less uses only the first
// lane.
#pragma once

#include <algorithm>
#include <cstddef>

namespace paceline::executor {

// Long enough to keep a lane busy between two system calls, short enough for all lanes to finish at about the same
// time.
constexpr std::size_t kStripe = 256 << 10;

// Returns the number of lanes that a message of `nbytes` bytes uses if the peer has `lanes` lanes.
constexpr std::size_t lanes_for(std::size_t nbytes, std::size_t lanes) {
    return nbytes <= kStripe ? 1 : lanes;
}

// Returns the offset, within the message, of the next byte on lane `lane`, which has moved `moved` bytes of the message
// so far. The byte is in the lane's (moved / kStripe)-th stripe, which is the message's (moved / kStripe * lanes +
// lane)-th stripe. With one lane the offset is `moved` itself.
constexpr std::size_t stripe_offset(std::size_t moved, std::size_t lane, std::size_t lanes) {
    return (moved / kStripe * lanes + lane) * kStripe + moved % kStripe;
}

struct StripeRange {  // a range of a message, in bytes
    std::size_t from = 0;
    std::size_t to = 0;
};

// Returns the range that lane `lane` may move next if the first `until` bytes of the message may be moved. The range
// ends no later than the stripe, because the next stripe belongs to another lane. `from >= to` means that the lane
// cannot move any bytes yet.
constexpr StripeRange next_range(std::size_t moved, std::size_t lane, std::size_t lanes, std::size_t until) {
    if (lanes == 1) return {moved, until};
    const std::size_t from = stripe_offset(moved, lane, lanes);
    return {from, std::min(until, from - from % kStripe + kStripe)};
}

// Returns the length of the prefix of a striped message that has been moved without a gap. The lanes advance
// independently, and later steps may use only bytes without a gap before them.
template <class LaneStates>
std::size_t contiguous(const LaneStates& states, std::size_t lanes, std::size_t nbytes) {
    if (lanes == 1) return states[0].moved;
    std::size_t end = nbytes;
    for (std::size_t l = 0; l < lanes; ++l) end = std::min(end, stripe_offset(states[l].moved, l, lanes));
    return end;
}

}  // namespace paceline::executor
