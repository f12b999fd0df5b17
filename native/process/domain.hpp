// Which part of the machine a process runs in: the ranks of one part reach each other's memory sooner than that of
// others.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "process/cores.hpp"

namespace paceline {

// A NUMA node, and a cache of the third level, that has all cores of a process; -1 where none has. The number of a
// cache is that of its first core.
struct Domain {
    int node = -1;
    int cache = -1;
};

// Looks it up for a process that may use `cores`. `root` stands before /sys.
Domain domain_of(const Cores& cores, const std::string& root = "");

// How many ranks in a row reduce among themselves before they do so with the others: the largest power of two by which
// the ranks can be cut into blocks of one NUMA node each or, on a single node, of one cache each. With such blocks the
// order of the sums is the same as without. 0 where all ranks are alike, where the parts of the machine do not have at
// least kLeastBlock ranks in a row, or where there would be more blocks than ranks in one.
constexpr std::size_t kLeastBlock = 4;
std::size_t block_of(std::span<const Domain> ranks);

}  // namespace paceline
