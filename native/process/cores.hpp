// The cores that the kernel lets this process use, which decide whether a waiting rank may keep its core busy.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

namespace paceline {

// How much of the machine's time the processes of a cgroup get, in versions 2 and 1.
struct Quota {
    double cores = 0;          // 0: as much as there is
    std::uint64_t cgroup = 0;  // tells the cgroups apart that share a quota; their directory's inode number
};

// The smallest quota of this process's cgroup and those around it. `root` stands before /proc and /sys.
Quota cpu_quota(const std::string& root = "");

struct Cores {
    static constexpr std::size_t kMost = 1024;

    std::array<std::uint64_t, kMost / 64> allowed{};  // by affinity, a bit for each of the first `kMost` cores
    Quota quota;
    int threads = 1;  // that the process computes with

    // How many cores this process can keep busy, at least 1; a part of a core counts as one.
    int count() const;
};

Cores usable_cores();

// How many of these processes there are for each core that `ranks[mine]` may use: they compete for cores that their
// affinities share and for a quota that their cgroup has. If it is more than 1, a process that waits with its core busy
// takes time from another one.
double crowding(std::span<const Cores> ranks, std::size_t mine);

// Whether each of these processes has a core for one more thread besides those that it computes on. The host has
// `absent` more of their kind; if all of `ranks` share their cores, so do the absent ones.
bool has_spare_core(std::span<const Cores> ranks, std::size_t mine, std::size_t absent);

}  // namespace paceline
