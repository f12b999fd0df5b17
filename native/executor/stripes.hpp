// How a long message is striped over the lanes to its peer.
//
// The message is cut into stripes of kStripe bytes, which the lanes take in rotation: with three lanes, lane 1 carries
// stripes 1, 4, 7, ... Sender and receiver both compute from what each lane has moved where its next byte belongs, so
// nothing on the wire says that. A message of one stripe or less uses the first lane only.
#pragma once

#include <algorithm>
#include <cstddef>

namespace paceline::executor {

// Long enough to keep a lane busy between two system calls, and short enough that the lanes finish at about the same
// time.
constexpr std::size_t kStripe = 256 << 10;

// How many of a peer's `lanes` a message uses.
constexpr std::size_t lanes_for(std::size_t nbytes, std::size_t lanes) {
    return nbytes <= kStripe ? 1 : lanes;
}

// The offset in its message of the next byte on lane `lane`, which has moved `moved` bytes of it so far: it is in the
// stripe that is the (moved / kStripe)-th of the lane and the (moved / kStripe * lanes + lane)-th of the message. With
// one lane the offset is `moved` itself.
constexpr std::size_t stripe_offset(std::size_t moved, std::size_t lane, std::size_t lanes) {
    return (moved / kStripe * lanes + lane) * kStripe + moved % kStripe;
}

struct Range {  // of a message, in bytes
    std::size_t from = 0;
    std::size_t to = 0;
};

// What lane `lane` may move next of a message of which the first `until` bytes may be moved: up to the end of its
// stripe, since the next byte belongs to another lane. Empty, or even reversed, when it may move nothing.
constexpr Range next_range(std::size_t moved, std::size_t lane, std::size_t lanes, std::size_t until) {
    if (lanes == 1) return {moved, until};
    const std::size_t from = stripe_offset(moved, lane, lanes);
    return {from, std::min(until, from - from % kStripe + kStripe)};
}

// Length of the contiguous prefix moved so far of a message striped over `lanes`. The lanes advance independently, and
// a later step may use only the bytes that have no gap before them.
template <class LaneStates>
std::size_t contiguous(const LaneStates& states, std::size_t lanes, std::size_t nbytes) {
    if (lanes == 1) return states[0].moved;
    std::size_t end = nbytes;
    for (std::size_t l = 0; l < lanes; ++l) end = std::min(end, stripe_offset(states[l].moved, l, lanes));
    return end;
}

}  // namespace paceline::executor
