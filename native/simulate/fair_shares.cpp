#include "simulate/fair_shares.hpp"

#include <algorithm>
#include <limits>
#include <utility>

namespace paceline::simulate {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kRounding = 1 + 1e-12;  // the ratio below which two shares differ only by rounding

}  // namespace

FairShares::FairShares(std::vector<double> capacities) : links_(capacities.size()) {
    for (std::size_t i = 0; i < capacities.size(); ++i) links_[i].capacity = capacities[i];
}

void FairShares::add_route(std::vector<LinkUse> uses, double max_rate) {
    routes_.push_back({std::move(uses), max_rate, 0, false, false});
}

void FairShares::open(std::uint32_t number) {
    Route& route = routes_[number];
    if (route.is_open) return;
    route.is_open = true;
    for (const LinkUse& use : route.uses) {
        links_[use.link].open.push_back(number);
        changed_links_.push_back(use.link);
    }
}

void FairShares::close(std::uint32_t number) {
    Route& route = routes_[number];
    if (!route.is_open) return;
    route.is_open = false;
    for (const LinkUse& use : route.uses) {
        std::vector<std::uint32_t>& open = links_[use.link].open;
        *std::find(open.begin(), open.end(), number) = open.back();
        open.pop_back();
        changed_links_.push_back(use.link);
    }
}

const std::vector<std::uint32_t>& FairShares::allocate() {
    find_affected();
    fill();
    for (const std::uint32_t number : affected_routes_) routes_[number].is_affected = false;
    for (const std::uint32_t number : affected_links_) links_[number].is_affected = false;
    return affected_routes_;
}

// Collects the changed links, and then repeatedly adds the open routes that cross a collected link, and the links of
// these routes.
void FairShares::find_affected() {
    affected_routes_.clear();
    affected_links_.clear();
    for (const std::uint32_t link : changed_links_) add_affected_link(link);
    changed_links_.clear();
    for (std::size_t at = 0; at < affected_links_.size(); ++at) {
        for (const std::uint32_t number : links_[affected_links_[at]].open) {
            Route& route = routes_[number];
            if (std::exchange(route.is_affected, true)) continue;
            affected_routes_.push_back(number);
            for (const LinkUse& use : route.uses) add_affected_link(use.link);
        }
    }
}

void FairShares::add_affected_link(std::uint32_t link) {
    if (std::exchange(links_[link].is_affected, true)) return;
    affected_links_.push_back(link);
}

// Raises all rates together until a link is full or a route reaches its limit. The rates of the affected routes are
// then fixed, and the remaining rates are raised further.
void FairShares::fill() {
    for (const std::uint32_t number : affected_links_) {
        links_[number].left = links_[number].capacity;
        links_[number].load = 0;
    }
    for (const std::uint32_t number : affected_routes_)
        for (const LinkUse& use : routes_[number].uses) links_[use.link].load += use.weight;
    unfixed_routes_ = affected_routes_;
    while (!unfixed_routes_.empty()) {
        double least = kInfinity;
        for (const std::uint32_t number : unfixed_routes_) {
            least = std::min(least, routes_[number].max_rate);
            for (const LinkUse& use : routes_[number].uses)
                least = std::min(least, links_[use.link].left / links_[use.link].load);
        }
        for (const std::uint32_t number : affected_links_) {
            Link& link = links_[number];
            link.is_full = link.load > 0 && link.left <= least * kRounding * link.load;
        }
        const auto is_fixed = [&](std::uint32_t number) {
            const Route& route = routes_[number];
            return route.max_rate <= least * kRounding ||
                   std::any_of(route.uses.begin(), route.uses.end(),
                               [&](const LinkUse& use) { return links_[use.link].is_full; });
        };
        const auto fixed = std::stable_partition(unfixed_routes_.begin(), unfixed_routes_.end(),
                                                 [&](std::uint32_t number) { return !is_fixed(number); });
        for (auto each = fixed; each != unfixed_routes_.end(); ++each) {
            routes_[*each].rate = least;
            for (const LinkUse& use : routes_[*each].uses) {
                Link& link = links_[use.link];
                link.left = std::max(0.0, link.left - least * use.weight);
                link.load -= use.weight;
            }
        }
        unfixed_routes_.erase(fixed, unfixed_routes_.end());
    }
}

}  // namespace paceline::simulate
