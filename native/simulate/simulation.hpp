// Simulates one collective: runs the ranks' schedules over shared links.
//
// The model follows the executor. The messages between two ranks are sequential, in the order of their schedules; each
// advances in pieces, as far as earlier steps have advanced. A piece moves at the rate that FairShares assigns, arrives
// after the latency of its route, and waits at the receiver until the receiving step can consume it. A rank reduces one
// received piece at a time while other pieces are moving. Consecutive messages to the same peer form one stream.
//
// A program represents one rank or a set of equivalent ranks. Each route of a program that represents a set represents
// one route per rank, and `LinkUse::weight` is the number of these routes that cross the link.
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
    double speed = 1;  // relative speed of reductions; 0.5 doubles their duration
};

// A route from one program to another. Peers are rank numbers as used in the programs' schedules.
struct Route {
    std::uint32_t source = 0;
    int source_peer = 0;
    std::uint32_t target = 0;
    int target_peer = 0;
    double latency_s = 0;
    double overhead_s = 0;
    double max_rate = 0;  // the maximum rate in bytes per second
    std::vector<LinkUse> uses;
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

// The message sent by the sender's step `step`, from the departure of its first byte to the arrival of its last byte.
struct Transfer {
    std::uint32_t route;
    std::uint32_t step;
    double nbytes;
    double begin_s;
    double end_s;
};

struct SimulationResult {
    std::vector<double> ends_s;          // end times, by program
    std::vector<double> carried_nbytes;  // bytes carried, by link
    std::vector<Transfer> transfers;     // empty unless the scenario records them
};

// Throws std::invalid_argument if a schedule sends to a peer without a route, or never completes.
SimulationResult simulate(const Scenario& scenario);

}  // namespace paceline::simulate
