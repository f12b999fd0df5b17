// The part of the machine in which a process runs: ranks access the memory of ranks in the same part faster than that
// of others.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "process/cores.hpp"

namespace paceline {

// The NUMA node and the L3 cache that contain all cores of a process, or -1 if there is none. The number of a cache is
// that of its first core.
struct Domain {
    int node = -1;
    int cache = -1;
};

// Returns the domain of a process that may use `cores`. `root` is prepended to /sys.
Domain domain_of(const Cores& cores, const std::string& root = "");

// Returns how many consecutive ranks reduce among themselves before they reduce with the others: the largest power of
// two such that each block of ranks is on one NUMA node or, on a single node, shares one cache. The order of the sums
// is the same as without blocks. Returns 0 if all ranks are in the same part, if the parts do not have at least
// kLeastBlock consecutive ranks, or if there would be more blocks than ranks in a block.
constexpr std::size_t kLeastBlock = 4;
std::size_t block_of(std::span<const Domain> ranks);

}  // namespace paceline
