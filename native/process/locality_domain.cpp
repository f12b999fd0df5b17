#include "process/locality_domain.hpp"

#include <fstream>
#include <functional>
#include <numeric>
#include <optional>
#include <sstream>

namespace paceline {
namespace {

using Allowed = decltype(Cores::allowed);

constexpr int kMaxNodes = 128;
constexpr int kMaxCaches = 8;  // maximum number of caches per core
constexpr int kSharedLevel = 3;

// Reads a list of cores such as "0-3,8" from a file; returns nullopt if the file cannot be read.
std::optional<Allowed> cores_in(const std::string& path) {
    std::ifstream file(path);
    std::string line;
    if (!std::getline(file, line)) return std::nullopt;
    Allowed cores{};
    std::istringstream runs(line);
    for (std::string run; std::getline(runs, run, ',');) {
        std::istringstream ends(run);
        std::size_t first = 0;
        char dash = 0;
        if (!(ends >> first)) continue;
        std::size_t last = first;
        ends >> dash >> last;
        for (std::size_t core = first; core <= last && core < Cores::kMax; ++core)
            cores[core / 64] |= std::uint64_t{1} << (core % 64);
    }
    return cores;
}

bool holds(const std::optional<Allowed>& all, const Allowed& some) {
    if (!all) return false;
    for (std::size_t i = 0; i < some.size(); ++i)
        if ((some[i] & ~(*all)[i]) != 0) return false;
    return true;
}

int first_of(const Allowed& cores) {
    for (std::size_t core = 0; core < Cores::kMax; ++core)
        if ((cores[core / 64] >> (core % 64) & 1) != 0) return static_cast<int>(core);
    return -1;
}

int node_of(const Allowed& cores, const std::string& root) {
    for (int node = 0; node < kMaxNodes; ++node)
        if (holds(cores_in(root + "/sys/devices/system/node/node" + std::to_string(node) + "/cpulist"), cores))
            return node;
    return -1;
}

int cache_of(const Allowed& cores, const std::string& root) {
    const std::string caches = root + "/sys/devices/system/cpu/cpu" + std::to_string(first_of(cores)) + "/cache/index";
    for (int index = 0; index < kMaxCaches; ++index) {
        const std::string cache = caches + std::to_string(index);
        int level = 0;
        if (std::ifstream file(cache + "/level"); !(file >> level) || level != kSharedLevel) continue;
        const std::optional<Allowed> shared = cores_in(cache + "/shared_cpu_list");
        if (holds(shared, cores)) return first_of(*shared);
    }
    return -1;
}

// Returns the largest power of two that divides the length of every run of consecutive ranks in the same place (the
// result of `place_of`). Returns 0 if all ranks are in the same place, if a place is unknown (negative), or if blocks
// would not reduce the traffic enough.
std::size_t common_block(std::span<const LocalityDomain> ranks,
                         const std::function<int(const LocalityDomain&)>& place_of) {
    std::size_t divisor = 0;
    std::size_t runs = 0;
    for (std::size_t first = 0; first < ranks.size(); ++runs) {
        const int place = place_of(ranks[first]);
        if (place < 0) return 0;
        std::size_t end = first;
        while (end < ranks.size() && place_of(ranks[end]) == place) ++end;
        divisor = std::gcd(divisor, end - first);
        first = end;
    }
    const std::size_t block = divisor & (~divisor + 1);
    // With small or numerous blocks, this would barely reduce the data moved between NUMA nodes or caches.
    const bool is_worth_it = block >= kMinBlock && ranks.size() / block <= block;
    return runs > 1 && is_worth_it ? block : 0;
}

}  // namespace

LocalityDomain domain_of(const Cores& cores, const std::string& root) {
    if (first_of(cores.allowed) < 0) return {};
    return {node_of(cores.allowed, root), cache_of(cores.allowed, root)};
}

std::size_t reduction_block(std::span<const LocalityDomain> ranks) {
    const std::size_t by_node = common_block(ranks, [](const LocalityDomain& each) { return each.node; });
    return by_node != 0 ? by_node : common_block(ranks, [](const LocalityDomain& each) { return each.cache; });
}

}  // namespace paceline
