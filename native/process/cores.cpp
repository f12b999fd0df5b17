#include "process/cores.hpp"

#include <sched.h>
#include <sys/stat.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <fstream>
#include <thread>

#include "process/cgroups.hpp"

namespace paceline {
namespace {

double quota_in(const std::string& directory) {
    double quota = 0, period = 0;
    if (std::ifstream file(directory + "/cpu.max"); file >> quota >> period) return period > 0 ? quota / period : 0;
    std::ifstream quota_file(directory + "/cpu.cfs_quota_us"), period_file(directory + "/cpu.cfs_period_us");
    if (quota_file >> quota && period_file >> period && quota > 0 && period > 0) return quota / period;
    return 0;
}

std::uint64_t inode(const std::string& directory) {
    struct stat found{};
    return stat(directory.c_str(), &found) == 0 ? static_cast<std::uint64_t>(found.st_ino) : 0;
}

bool overlap(const Cores& a, const Cores& b) {
    for (std::size_t i = 0; i < a.allowed.size(); ++i)
        if ((a.allowed[i] & b.allowed[i]) != 0) return true;
    return false;
}

// The load and the cores of all processes that compete with a given process.
struct Contention {
    double busy = 0;            // the number of busy threads on the shared cores
    double busy_in_cgroup = 0;  // the number of busy threads that share the process's quota
    std::size_t processes = 0;  // the number of processes on the shared cores
    Cores together;             // the cores of all these processes

    double oversubscription(const Cores& me) const {
        const double on_cores = busy / together.count();
        return me.quota.cores > 0 ? std::max(on_cores, busy_in_cgroup / me.quota.cores) : on_cores;
    }
};

// `busy_in` returns how many threads a process keeps busy.
template <class BusyIn>
Contention contention_of(std::span<const Cores> ranks, const Cores& me, BusyIn busy_in) {
    Contention contention;
    for (const Cores& each : ranks) {
        if (each.quota.cgroup == me.quota.cgroup) contention.busy_in_cgroup += busy_in(each);
        if (!overlap(me, each)) continue;
        ++contention.processes;
        contention.busy += busy_in(each);
        for (std::size_t i = 0; i < each.allowed.size(); ++i) contention.together.allowed[i] |= each.allowed[i];
    }
    return contention;
}

}  // namespace

CpuQuota cpu_quota(const std::string& root) {
    CpuQuota smallest;
    for (const std::string& directory : cgroups_of_this_process("cpu", root).directories) {
        const double cores = quota_in(directory);
        if (cores > 0 && (smallest.cores == 0 || cores < smallest.cores)) smallest = {cores, inode(directory)};
    }
    return smallest;
}

int Cores::count() const {
    int cores = 0;
    for (const std::uint64_t each : allowed) cores += std::popcount(each);
    if (quota.cores > 0) cores = std::min(cores, static_cast<int>(std::ceil(quota.cores)));
    return std::max(1, cores);
}

Cores usable_cores() {
    Cores mine;
    mine.quota = cpu_quota();
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    static_assert(CPU_SETSIZE == Cores::kMax);
    const bool known = sched_getaffinity(0, sizeof allowed, &allowed) == 0;
    const std::size_t all = std::min<std::size_t>(std::thread::hardware_concurrency(), Cores::kMax);
    for (std::size_t core = 0; core < Cores::kMax; ++core)
        if (known ? CPU_ISSET(core, &allowed) : core < all) mine.allowed[core / 64] |= std::uint64_t{1} << (core % 64);
    return mine;
}

double oversubscription(std::span<const Cores> ranks, std::size_t mine) {
    const auto one_each = [](const Cores&) { return 1.0; };
    return contention_of(ranks, ranks[mine], one_each).oversubscription(ranks[mine]);
}

bool has_spare_core(std::span<const Cores> ranks, std::size_t mine, std::size_t absent) {
    const Cores& me = ranks[mine];
    const auto one_more = [](const Cores& each) { return each.threads + 1.0; };
    Contention contention = contention_of(ranks, me, one_more);
    const double elsewhere = static_cast<double>(absent) * one_more(me);
    if (contention.processes == ranks.size()) contention.busy += elsewhere;
    contention.busy_in_cgroup += elsewhere;
    return contention.oversubscription(me) <= 1;
}

}  // namespace paceline
