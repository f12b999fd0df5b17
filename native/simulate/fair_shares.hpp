// Divides links among the transfers that cross them: max-min fairness, as of Bertsekas and Gallager 1992,
// section 6.5.2. No transfer can be faster without making slower one that is no faster than itself.
#pragma once

#include <cstdint>
#include <vector>

namespace paceline::simulate {

// A link that a route crosses. `weight` is how much of it a byte takes: several routes may stand for one another.
struct Use {
    std::uint32_t link = 0;
    double weight = 1;
};

class FairShares {
  public:
    // `capacities` are those of the links in bytes a second. Routes are added once, in their order; each crosses a
    // link.
    explicit FairShares(std::vector<double> capacities);
    void add_route(std::vector<Use> uses, double most);

    // Says that something begins, or ceases, to move over a route.
    void open(std::uint32_t route);
    void close(std::uint32_t route);

    // Divides anew the links that the routes opened and closed since the last call touch, directly or through others.
    // Returns the open routes whose rate was decided; they are valid until the next call.
    const std::vector<std::uint32_t>& divide();

    double rate(std::uint32_t route) const { return routes_[route].rate; }

  private:
    struct Route {
        std::vector<Use> uses;
        double most = 0;
        double rate = 0;
        bool is_open = false;
        bool is_found = false;
    };

    struct Link {
        double capacity = 0;
        std::vector<std::uint32_t> open;
        double left = 0;
        double load = 0;
        bool is_found = false;
        bool is_full = false;
    };

    void find_affected();
    void find(std::uint32_t link);
    void fill();

    std::vector<Route> routes_;
    std::vector<Link> links_;
    std::vector<std::uint32_t> touched_;
    std::vector<std::uint32_t> found_routes_;
    std::vector<std::uint32_t> found_links_;
    std::vector<std::uint32_t> unfixed_;
};

}  // namespace paceline::simulate
