// The cores that the kernel lets this process use, which determine whether a waiting rank may busy-wait.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

namespace paceline {

// The processor time that the processes of a cgroup may use, in versions 1 and 2.
struct Quota {
    double cores = 0;          // 0: no limit
    std::uint64_t cgroup = 0;  // the inode number of the directory, which identifies the cgroup with the quota
};

// Returns the smallest quota of this process's cgroup and its ancestors. `root` is prepended to /proc and /sys.
Quota cpu_quota(const std::string& root = "");

struct Cores {
    static constexpr std::size_t kMost = 1024;

    std::array<std::uint64_t, kMost / 64> allowed{};  // by affinity, a bit for each of the first `kMost` cores
    Quota quota;
    int threads = 1;  // the number of threads with which the process computes

    // Returns the number of cores that this process can keep busy, at least 1; a part of a core counts as one.
    int count() const;
};

Cores usable_cores();

// Returns the number of these processes per core that `ranks[mine]` may use: they compete for the cores that their
// affinities share and for their cgroup's quota. If it is more than 1, a busy-waiting process takes time from another
// process.
double crowding(std::span<const Cores> ranks, std::size_t mine);

// Whether each of these processes has a core for one more thread in addition to the cores on which it computes. The
// host has `absent` more such processes; if all of `ranks` share their cores, the absent ones share them too.
bool has_spare_core(std::span<const Cores> ranks, std::size_t mine, std::size_t absent);

}  // namespace paceline
