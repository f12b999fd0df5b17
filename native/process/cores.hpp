// The cores available to this process, which determine whether a waiting rank may busy-wait.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

namespace paceline {

// The CPU quota of a cgroup (version 1 or 2).
struct CpuQuota {
    double cores = 0;          // 0: no limit
    std::uint64_t cgroup = 0;  // the inode number of the directory, which identifies the cgroup with the quota
};

// Returns the smallest quota of this process's cgroup and its ancestors. `root` is prepended to /proc and /sys.
CpuQuota cpu_quota(const std::string& root = "");

struct Cores {
    static constexpr std::size_t kMax = 1024;

    std::array<std::uint64_t, kMax / 64> allowed{};  // the affinity mask: one bit for each of the first `kMax` cores
    CpuQuota quota;
    int threads = 1;  // the number of compute threads in the process

    // Returns the number of cores that this process can keep busy, rounded up and at least 1.
    int count() const;
};

Cores usable_cores();

// Returns the number of processes per core available to `ranks[mine]`, taking into account overlapping affinities and
// the cgroup's quota. If the result is above 1, a busy-waiting process takes CPU time from another process.
double oversubscription(std::span<const Cores> ranks, std::size_t mine);

// Returns true if each of these processes has a spare core for one more thread. `absent` is the number of similar
// processes on the host that are not in `ranks`; they are assumed to share the cores if all of `ranks` do.
bool has_spare_core(std::span<const Cores> ranks, std::size_t mine, std::size_t absent);

}  // namespace paceline
