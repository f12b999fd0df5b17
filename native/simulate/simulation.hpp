// Simulates one collective: the schedules that ranks run, over links that they share.
//
// The model follows the executor. Messages of two ranks follow one another in the order of their schedules; each goes
// on as far as earlier steps have come, in pieces. A piece moves at the rate of FairShares, takes the latency of its
// route, and waits at the receiver until the receiving step may take it. A rank reduces what it has received piece by
// piece, one at a time, while others move. Messages that directly follow one another to the same peer are one stream.
//
// A program stands for one rank, or for all ranks that look alike; then a route stands for equally many routes, and the
// weights of its uses say how many of them share a link.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "executor/schedule.hpp"
#include "simulate/fair_shares.hpp"

namespace paceline::simulate {

struct Program {
    std::shared_ptr<const executor::Schedule> schedule;
    double arrival_s = 0;
    double speed = 1;  // 0.5 for a rank that takes twice as long to reduce
};

// From one program to another. A peer is the number by which the program's schedule knows the other.
struct Route {
    std::uint32_t source = 0;
    int source_peer = 0;
    std::uint32_t target = 0;
    int target_peer = 0;
    double latency_s = 0;
    double overhead_s = 0;
    double most = 0;  // bytes a second
    std::vector<Use> uses;
};

struct Scenario {
    std::vector<Program> programs;
    std::vector<Route> routes;
    std::vector<double> capacities;  // of the links, in bytes a second
    double block_nbytes = 0;
    double gamma_s_per_byte = 0;
    double piece_nbytes = 0;
    bool records = false;
};

// A message of the step `step` of its sender, from its first byte's departure to its last one's arrival.
struct Transfer {
    std::uint32_t route;
    std::uint32_t step;
    double nbytes;
    double begin_s;
    double end_s;
};

struct Timing {
    std::vector<double> ends_s;          // of each program
    std::vector<double> carried_nbytes;  // by each link
    std::vector<Transfer> transfers;     // if the scenario records them
};

// Throws std::invalid_argument if a schedule sends to a peer to which there is no route, or waits for ever.
Timing simulate(const Scenario& scenario);

}  // namespace paceline::simulate
