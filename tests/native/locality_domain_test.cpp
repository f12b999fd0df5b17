// Tests the domains that are detected for processes on simulated machines, and the block sizes for reductions.
#include "process/locality_domain.hpp"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "check.hpp"

namespace {

using namespace paceline;

void write(const std::filesystem::path& path, const std::string& text) {
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text << '\n';
}

// A machine with two nodes. Each node has two caches and eight logical cores, which are not numbered consecutively: the
// last four are the hyperthreads of the first four.
std::filesystem::path machine() {
    std::string name = std::filesystem::temp_directory_path() / "paceline-domain-XXXXXX";
    CHECK(mkdtemp(name.data()) != nullptr);
    const std::filesystem::path root = name;
    const auto system = root / "sys/devices/system";
    write(system / "node/node0/cpulist", "0-3,8-11");
    write(system / "node/node1/cpulist", "4-7,12-15");
    for (int core = 0; core < 16; ++core) {
        const auto cache = system / ("cpu/cpu" + std::to_string(core)) / "cache";
        const int first = core % 8 / 2 * 2;
        write(cache / "index0/level", "1");
        write(cache / "index0/shared_cpu_list", std::to_string(core));
        write(cache / "index3/level", "3");
        write(cache / "index3/shared_cpu_list", std::to_string(first) + "-" + std::to_string(first + 1) + "," +
                                                    std::to_string(first + 8) + "-" + std::to_string(first + 9));
    }
    return root;
}

LocalityDomain of(std::uint64_t allowed, const std::filesystem::path& root) {
    Cores cores;
    cores.allowed[0] = allowed;
    return domain_of(cores, root);
}

void a_domain_contains_all_cores_of_its_process() {
    const auto root = machine();
    CHECK(of(1 << 5, root).node == 1 && of(1 << 5, root).cache == 4);
    CHECK(of(1 << 13 | 1 << 4, root).node == 1 && of(1 << 13 | 1 << 4, root).cache == 4);
    CHECK(of(0xf0f, root).node == 0 && of(0xf0f, root).cache == -1);
    CHECK(of(0xffff, root).node == -1 && of(0xffff, root).cache == -1);
    CHECK(of(0, root).node == -1 && of(1, root / "nothing").node == -1);
    std::filesystem::remove_all(root);
}

// A number of consecutive ranks on the same node and with the same cache.
struct RankRange {
    std::size_t ranks;
    int node;
    int cache;
};

std::size_t block(const std::vector<RankRange>& runs) {
    std::vector<LocalityDomain> ranks;
    for (const RankRange& run : runs) ranks.insert(ranks.end(), run.ranks, LocalityDomain{run.node, run.cache});
    return reduction_block(ranks);
}

void blocks_are_powers_of_two_that_fit_into_every_part() {
    CHECK(block({{8, 0, 0}, {8, 1, 4}}) == 8);
    CHECK(block({{48, 0, 0}, {48, 1, 4}}) == 16);
    CHECK(block({{8, 0, 0}, {4, 1, 4}}) == 4);
    CHECK(block({{8, 0, 0}, {8, 1, 4}, {8, 0, 0}}) == 8);
    CHECK(block({{4, 0, 0}, {4, 0, 4}}) == 4);                         // one node with two caches
    CHECK(block({{4, 0, 0}, {4, 0, 4}, {4, 1, 8}, {4, 1, 12}}) == 8);  // nodes take precedence over caches
}

void there_are_no_blocks_where_they_would_not_help() {
    CHECK(block({{16, 0, 0}}) == 0);
    CHECK(block({{2, 0, 0}, {2, 1, 4}}) == 0);
    CHECK(block({{6, 0, 0}, {6, 1, 4}}) == 0);
    CHECK(block({{8, 0, 0}, {8, -1, -1}}) == 0);
    CHECK(block({{4, 0, 0}, {4, 1, 0}, {4, 2, 0}, {4, 3, 0}, {4, 4, 0}}) == 0);
    CHECK(block({}) == 0);
}

}  // namespace

int main() {
    a_domain_contains_all_cores_of_its_process();
    blocks_are_powers_of_two_that_fit_into_every_part();
    there_are_no_blocks_where_they_would_not_help();
}
