// Tests which ranks may keep their cores busy while they wait.
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

bool any_crowded(const std::vector<Cores>& ranks) {
    for (std::size_t i = 0; i < ranks.size(); ++i)
        if (is_crowded(ranks, i)) return true;
    return false;
}

}  // namespace

int main() {
    CHECK(!any_crowded({on(0b11), on(0b11)}));
    CHECK(any_crowded({on(0b11), on(0b11), on(0b11)}));

    // Ranks with a core of their own compete with nobody.
    CHECK(!any_crowded({on(0b01), on(0b10)}));
    CHECK(any_crowded({on(0b01), on(0b01)}));
    const std::vector<Cores> mixed = {on(0b001), on(0b001), on(0b110)};
    CHECK(is_crowded(mixed, 0));
    CHECK(!is_crowded(mixed, 2));

    // A quota counts for the ranks that share it, however many cores they see.
    CHECK(any_crowded({on(0xff, 1.5, 7), on(0xff, 1.5, 7)}));
    CHECK(!any_crowded({on(0xff, 2, 7), on(0xff, 2, 7)}));
    CHECK(!any_crowded({on(0xff, 1, 7), on(0xff, 1, 8)}));
    CHECK(any_crowded({on(0xff, 0.5, 7)}));

    CHECK(on(0xff).count() == 8);
    CHECK(on(0xff, 1.5, 7).count() == 2);
    CHECK(on(0b1, 3, 7).count() == 1);
    CHECK(on(0).count() == 1);
    CHECK(usable_cores().count() >= 1);
    return 0;
}
