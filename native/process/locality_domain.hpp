// The NUMA node on which a process runs, and the cache that it uses. Ranks in the same domain access each other's
// memory faster.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "process/cores.hpp"

namespace paceline {

// The NUMA node and the L3 cache that contain all cores of a process; -1 if there is no such node or cache. A cache is
// identified by the number of its first core.
struct LocalityDomain {
    int node = -1;
    int cache = -1;
};

// Returns the domain of a process that may use `cores`. `root` is prepended to /sys.
LocalityDomain domain_of(const Cores& cores, const std::string& root = "");

// Returns the block size for hierarchical reductions: the largest power of two such that each block of consecutive
// ranks is on one NUMA node or, on a single node, shares one cache. Blocks do not change the order of the sums. Returns
// 0 if all ranks are in one domain, if blocks would have fewer than kMinBlock ranks, or if there would be more blocks
// than ranks per block.
constexpr std::size_t kMinBlock = 4;
std::size_t reduction_block(std::span<const LocalityDomain> ranks);

}  // namespace paceline
