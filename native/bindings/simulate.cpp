// Bindings for the simulation of a collective, used by paceline.comm.schedule.simulation.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.hpp"
#include "simulate/simulation.hpp"

namespace nb = nanobind;

namespace paceline::bindings {
namespace {

using simulate::Route;
using simulate::Scenario;

constexpr std::size_t kNumbersPerRoute = 8;

std::vector<double> to_doubles(const nb::bytes& bytes) {
    std::vector<double> numbers(bytes.size() / sizeof(double));
    std::memcpy(numbers.data(), bytes.c_str(), numbers.size() * sizeof(double));
    return numbers;
}

// Each route consists of eight numbers, followed by the index and the weight of every link on the route.
std::vector<Route> to_routes(const std::vector<double>& numbers) {
    std::vector<Route> routes;
    for (std::size_t at = 0; at < numbers.size();) {
        if (at + kNumbersPerRoute > numbers.size()) throw std::invalid_argument("a route is incomplete");
        const double* n = &numbers[at];
        Route route{static_cast<std::uint32_t>(n[0]),
                    static_cast<int>(n[1]),
                    static_cast<std::uint32_t>(n[2]),
                    static_cast<int>(n[3]),
                    n[4],
                    n[5],
                    n[6],
                    {}};
        const auto uses = static_cast<std::size_t>(n[7]);
        at += kNumbersPerRoute;
        if (!(n[7] >= 1) || uses > (numbers.size() - at) / 2) throw std::invalid_argument("a route lacks its links");
        for (std::size_t use = 0; use < uses; ++use, at += 2)
            route.uses.push_back({static_cast<std::uint32_t>(numbers[at]), numbers[at + 1]});
        routes.push_back(std::move(route));
    }
    return routes;
}

// Throws an exception, which becomes a ValueError in Python, if a size, time or rate would prevent the simulated time
// from advancing.
void require_times(const Scenario& scenario) {
    const auto is_amount = [](double number) { return number >= 0 && std::isfinite(number); };
    const auto is_rate = [](double number) { return number > 0; };
    bool are_sound = is_amount(scenario.block_nbytes) && is_amount(scenario.gamma_s_per_byte) &&
                     is_rate(scenario.piece_nbytes) &&
                     std::all_of(scenario.capacities.begin(), scenario.capacities.end(), is_rate);
    for (const auto& program : scenario.programs)
        are_sound = are_sound && std::isfinite(program.arrival_s) && is_rate(program.speed);
    for (const Route& route : scenario.routes) {
        are_sound = are_sound && is_amount(route.latency_s) && is_amount(route.overhead_s) && is_rate(route.max_rate);
        for (const auto& use : route.uses) are_sound = are_sound && is_amount(use.weight);
    }
    if (!are_sound)
        throw std::invalid_argument("amounts and times are finite and not negative, and rates are positive");
}

using Transfers = std::vector<std::tuple<std::uint32_t, std::uint32_t, double, double, double>>;

std::tuple<std::vector<double>, std::vector<double>, Transfers> simulate_schedules(
    const std::vector<std::shared_ptr<executor::Schedule>>& schedules, const nb::bytes& arrivals,
    const nb::bytes& speeds, const nb::bytes& routes, const nb::bytes& capacities, double block_nbytes,
    double gamma_s_per_byte, double piece_nbytes, bool records) {
    if (std::any_of(schedules.begin(), schedules.end(), [](const auto& each) { return each == nullptr; }))
        throw std::invalid_argument("a schedule is missing");
    Scenario scenario;
    const std::vector<double> come = to_doubles(arrivals);
    const std::vector<double> speed = to_doubles(speeds);
    for (std::size_t i = 0; i < schedules.size(); ++i)
        scenario.programs.push_back({schedules[i], come.at(i), speed.at(i)});
    scenario.routes = to_routes(to_doubles(routes));
    scenario.capacities = to_doubles(capacities);
    for (const Route& route : scenario.routes)
        for (const auto& use : route.uses)
            if (use.link >= scenario.capacities.size())
                throw std::invalid_argument("a route uses a link that is not there");
    scenario.block_nbytes = block_nbytes;
    scenario.gamma_s_per_byte = gamma_s_per_byte;
    scenario.piece_nbytes = piece_nbytes;
    require_times(scenario);
    scenario.records = records;
    simulate::SimulationResult timing;
    {
        nb::gil_scoped_release unlocked;
        timing = simulate::simulate(scenario);
    }
    Transfers transfers;
    for (const auto& [route, step, nbytes, begin_s, end_s] : timing.transfers)
        transfers.emplace_back(route, step, nbytes, begin_s, end_s);
    return {std::move(timing.ends_s), std::move(timing.carried_nbytes), std::move(transfers)};
}

}  // namespace

void register_simulation(nb::module_& module) {
    module.def("simulate", &simulate_schedules, nb::arg("schedules"), nb::arg("arrivals"), nb::arg("speeds"),
               nb::arg("routes"), nb::arg("capacities"), nb::arg("block_nbytes"), nb::arg("gamma_s_per_byte"),
               nb::arg("piece_nbytes"), nb::arg("records"));
}

}  // namespace paceline::bindings
