// The ranks, message streams and events in a simulation.
#pragma once

#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "simulate/rank_progress.hpp"
#include "simulate/simulation.hpp"

namespace paceline::simulate {

enum class EventKind : std::uint8_t { arrival, opened, moved, received, consumed, reduced };

struct Event {
    double at;
    std::uint32_t order;  // the stream's `order`: equivalent ranks process simultaneous events identically
    std::uint64_t number;
    EventKind what;
    std::uint32_t subject;  // the number of a rank or a stream, or of a step (`reduced`)
    std::uint32_t rank = 0;
    std::uint32_t version = 0;
    double nbytes = 0;

    bool operator>(const Event& other) const {
        return std::tie(at, order, number) > std::tie(other.at, other.order, other.number);
    }
};

struct SimulatedRank {
    RankProgress progress;
    double speed;
    bool has_arrived = false;
    double out_free_s = 0;  // earliest times at which the rank can start to send or receive a message
    double in_free_s = 0;
    double reduces_until_s = 0;
    double end_s = 0;
    std::map<int, std::uint32_t> streams_to{};
    std::map<int, std::uint32_t> streams_from{};
    std::vector<bool> is_reducing{};  // by step
};

// The messages that use one route.
struct MessageStream {
    const Route* route;
    const std::vector<std::uint32_t>* sends;
    const std::vector<std::uint32_t>* receives;
    std::uint32_t order;        // the difference between the numbers of target and source
    std::size_t sending = 0;    // the index of the current message in `sends`
    std::size_t receiving = 0;  // the index of the current message in `receives`
    bool is_open = false;       // whether the overhead of the current message has elapsed
    bool is_opening = false;
    bool is_moving = false;
    bool is_shared = false;  // whether the route is open in FairShares
    bool is_consuming = false;
    bool is_pending = false;
    bool has_changed = false;
    double piece = 0;
    double left = 0;
    double rate = 0;
    double since_s = 0;
    std::uint32_t version = 0;
    double waiting = 0;              // bytes that have arrived but have not been consumed by a step
    double arrived = 0;              // arrived bytes of the message with index `recorded`
    std::size_t recorded = 0;        // number of messages that have arrived completely
    std::vector<double> begins_s{};  // start times of the messages that have begun
};

}  // namespace paceline::simulate
