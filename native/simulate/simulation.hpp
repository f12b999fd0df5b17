// Simulates one collective: the schedules of the ranks, over links that the ranks share.
//
// The model follows the executor. The messages between two ranks are sequential, in the order of their schedules; each
// advances in pieces, as far as earlier steps have advanced. A piece moves at the rate of FairShares, takes the latency
// of its route, and waits at the receiver until the receiving step may consume it. A rank reduces the received data
// piece by piece, one at a time, while other pieces move. Messages that directly follow one another to the same peer
// form one stream.
//
// A program represents one rank or all equivalent ranks; in the second case, a route represents as many routes, and the
// weights of its uses are the numbers of these routes that share a link.
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

// A route from one program to another. A peer is the number of the other rank in the program's schedule.
struct Route {
    std::uint32_t source = 0;
    int source_peer = 0;
    std::uint32_t target = 0;
    int target_peer = 0;
    double latency_s = 0;
    double overhead_s = 0;
    double most = 0;  // the maximum rate in bytes per second
    std::vector<Use> uses;
};

struct Scenario {
    std::vector<Program> programs;
    std::vector<Route> routes;
    std::vector<double> capacities;  // the rates of the links, in bytes per second
    double block_nbytes = 0;
    double gamma_s_per_byte = 0;
    double piece_nbytes = 0;
    bool records = false;
};

// A message of the sender's step `step`, from the departure of its first byte to the arrival of its last byte.
struct Transfer {
    std::uint32_t route;
    std::uint32_t step;
    double nbytes;
    double begin_s;
    double end_s;
};

struct Timing {
    std::vector<double> ends_s;          // the end of each program
    std::vector<double> carried_nbytes;  // the bytes carried by each link
    std::vector<Transfer> transfers;     // empty unless the scenario records them
};

// Throws std::invalid_argument if a schedule sends to a peer to which there is no route, or waits forever.
Timing simulate(const Scenario& scenario);

}  // namespace paceline::simulate
