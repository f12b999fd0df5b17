// The ranks of a simulation, the streams of messages between them, and the events.
#pragma once

#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "simulate/rank_progress.hpp"
#include "simulate/simulation.hpp"

namespace paceline::simulate {

enum class What : std::uint8_t { arrival, opened, moved, received, taken, worked };

struct Event {
    double at;
    std::uint32_t order;  // the order of its stream, so that equivalent ranks treat simultaneous events in the same way
    std::uint64_t number;
    What what;
    std::uint32_t subject;  // a rank, a stream or, for `worked`, a step
    std::uint32_t rank = 0;
    std::uint32_t version = 0;
    double nbytes = 0;

    bool operator>(const Event& other) const {
        return std::tie(at, order, number) > std::tie(other.at, other.order, other.number);
    }
};

struct Rank {
    RankProgress progress;
    double speed;
    bool has_come = false;
    double out_free_s = 0;  // when it may begin to send, and when it may begin to receive, another message
    double in_free_s = 0;
    double works_until_s = 0;
    double end_s = 0;
    std::map<int, std::uint32_t> streams_to{};
    std::map<int, std::uint32_t> streams_from{};
    std::vector<bool> is_working{};  // for each step
};

// The messages of a route.
struct Stream {
    const Route* route;
    const std::vector<std::uint32_t>* sends;
    const std::vector<std::uint32_t>* receives;
    std::uint32_t order;        // the distance from the source to the target, by number
    std::size_t sending = 0;    // the index of the current message in `sends`
    std::size_t receiving = 0;  // the index of the current message in `receives`
    bool is_open = false;       // the overhead of the current message has passed
    bool is_opening = false;
    bool is_moving = false;
    bool is_shared = false;  // whether FairShares counts it
    bool is_taking = false;
    bool is_pending = false;
    bool has_changed = false;
    double piece = 0;
    double left = 0;
    double rate = 0;
    double since_s = 0;
    std::uint32_t version = 0;
    double waiting = 0;              // the bytes that have arrived and that no step has consumed
    double arrived = 0;              // the bytes of the message with the index `recorded` that have arrived
    std::size_t recorded = 0;        // the number of messages that have arrived
    std::vector<double> begins_s{};  // the start times of the messages that have begun
};

}  // namespace paceline::simulate
