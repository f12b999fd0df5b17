// Divides links among the transfers that cross them by max-min fairness (Bertsekas and Gallager 1992, section 6.5.2):
// the rate of a transfer cannot be raised without lowering the rate of another transfer that is no faster.
#pragma once

#include <cstdint>
#include <vector>

namespace paceline::simulate {

// A link that a route crosses. `weight` is the number of bytes on the link per byte of the route; it can exceed 1,
// because a route can represent several equivalent routes.
struct LinkUse {
    std::uint32_t link = 0;
    double weight = 1;
};

class FairShares {
  public:
    // `capacities` are the rates of the links in bytes per second. Routes are added once, in order; each crosses at
    // least one link.
    explicit FairShares(std::vector<double> capacities);
    void add_route(std::vector<LinkUse> uses, double max_rate);

    // These functions mark the beginning and the end of a transfer on a route.
    void open(std::uint32_t route);
    void close(std::uint32_t route);

    // Recomputes the rates on all links that are affected, directly or indirectly, by routes opened or closed since the
    // last call. Returns the open routes whose rates were set; the reference is valid until the next call.
    const std::vector<std::uint32_t>& allocate();

    double rate(std::uint32_t route) const { return routes_[route].rate; }

  private:
    struct Route {
        std::vector<LinkUse> uses;
        double max_rate = 0;
        double rate = 0;
        bool is_open = false;
        bool is_affected = false;
    };

    struct Link {
        double capacity = 0;
        std::vector<std::uint32_t> open;
        double left = 0;
        double load = 0;
        bool is_affected = false;
        bool is_full = false;
    };

    void find_affected();
    void add_affected_link(std::uint32_t link);
    void fill();

    std::vector<Route> routes_;
    std::vector<Link> links_;
    std::vector<std::uint32_t> changed_links_;
    std::vector<std::uint32_t> affected_routes_;
    std::vector<std::uint32_t> affected_links_;
    std::vector<std::uint32_t> unfixed_routes_;
};

}  // namespace paceline::simulate
