// Tests which ranks, and which of their threads, may busy-wait.
#include "process/cores.hpp"

#include <vector>

#include "check.hpp"

namespace {

using namespace paceline;

Cores on(std::uint64_t allowed, double quota = 0, std::uint64_t cgroup = 0) {
    Cores cores;
    cores.allowed[0] = allowed;
    cores.quota = {quota, cgroup};
    return cores;
}

Cores with_threads(int threads, Cores cores) {
    cores.threads = threads;
    return cores;
}

bool any_crowded(const std::vector<Cores>& ranks) {
    for (std::size_t i = 0; i < ranks.size(); ++i)
        if (oversubscription(ranks, i) > 1) return true;
    return false;
}

}  // namespace

int main() {
    CHECK(!any_crowded({on(0b11), on(0b11)}));
    CHECK(any_crowded({on(0b11), on(0b11), on(0b11)}));

    // A rank with its own core does not compete with other ranks.
    CHECK(!any_crowded({on(0b01), on(0b10)}));
    CHECK(any_crowded({on(0b01), on(0b01)}));
    const std::vector<Cores> mixed = {on(0b001), on(0b001), on(0b110)};
    CHECK(oversubscription(mixed, 0) > 1);
    CHECK(oversubscription(mixed, 2) == 0.5);

    // A quota limits the ranks that share it, regardless of the number of cores in their affinity masks.
    CHECK(any_crowded({on(0xff, 1.5, 7), on(0xff, 1.5, 7)}));
    CHECK(!any_crowded({on(0xff, 2, 7), on(0xff, 2, 7)}));
    CHECK(!any_crowded({on(0xff, 1, 7), on(0xff, 1, 8)}));
    CHECK(any_crowded({on(0xff, 0.5, 7)}));

    // A rank needs one core for each of its compute threads, and one spare core.
    const std::vector<Cores> two_on_four = {on(0xf), on(0xf)};
    CHECK(has_spare_core(two_on_four, 0, 0));
    CHECK(!has_spare_core(two_on_four, 0, 1));
    CHECK(!has_spare_core(std::vector{on(0x7), on(0x7)}, 0, 0));
    CHECK(!has_spare_core(std::vector{on(0xf), with_threads(2, on(0xf))}, 0, 0));
    CHECK(has_spare_core(std::vector{on(0x1f), with_threads(2, on(0x1f))}, 0, 0));
    // Ranks with separate cores do not take cores from each other. The ranks outside the group are assumed to have
    // separate cores as well.
    CHECK(has_spare_core(std::vector{on(0b0011), on(0b1100)}, 1, 6));
    CHECK(!has_spare_core(std::vector{on(0b0001), on(0b0110)}, 0, 0));
    CHECK(has_spare_core(std::vector{on(0b0001), on(0b0110)}, 1, 0));
    // All processes that share a quota count towards it.
    CHECK(has_spare_core(std::vector{on(0xff, 4, 7), on(0xff, 4, 7)}, 0, 0));
    CHECK(!has_spare_core(std::vector{on(0xff, 3.9, 7), on(0xff, 3.9, 7)}, 0, 0));
    CHECK(!has_spare_core(std::vector{on(0x0f, 4, 7), on(0xf0, 4, 7)}, 0, 1));

    CHECK(on(0xff).count() == 8);
    CHECK(on(0xff, 1.5, 7).count() == 2);
    CHECK(on(0b1, 3, 7).count() == 1);
    CHECK(on(0).count() == 1);
    CHECK(usable_cores().count() >= 1);
    return 0;
}
