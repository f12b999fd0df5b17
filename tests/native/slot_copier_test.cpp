// Tests which copy method a group's calls use, given simulated copy times, and tests the copies themselves.
#include "host/slot_copier.hpp"

#include <random>
#include <vector>

#include "check.hpp"

namespace {

using namespace paceline;
using namespace paceline::host;

struct CopyTimes {
    float cached, streamed;  // time per byte
};

constexpr CopyTimes kShared{0.3F, 0.6F}, kApart{1.5F, 0.3F};
constexpr std::uint32_t kToLearn = 5 * CopyMethodSelector::kPeriod;  // calls until changed copy times are detected

// Makes calls with the copy times `machine`; returns the number of calls that used the streamed method and were not
// measured.
std::uint32_t make(CopyMethodSelector& experience, std::uint32_t calls, CopyTimes machine) {
    std::uint32_t streamed = 0;
    for (std::uint32_t i = 0; i < calls; ++i) {
        const auto [method, is_measured] = experience.next();
        if (is_measured)
            experience.add_measurement(method, method == CopyMethod::cached ? machine.cached : machine.streamed);
        else if (method == CopyMethod::streamed)
            ++streamed;
    }
    return streamed;
}

void the_faster_method_is_used_also_after_the_ranks_have_moved() {
    CopyMethodSelector experience;
    make(experience, CopyMethodSelector::kInitialCalls, kApart);
    CHECK(make(experience, kToLearn, kApart) > kToLearn * 98 / 100);
    make(experience, kToLearn, kShared);
    CHECK(make(experience, kToLearn, kShared) == 0);
    make(experience, kToLearn, kApart);
    CHECK(make(experience, kToLearn, kApart) > kToLearn * 98 / 100);
}

void a_disturbed_measurement_does_not_change_the_method() {
    CopyMethodSelector experience;
    make(experience, kToLearn, kApart);
    for (const CopyMethod method :
         {CopyMethod::streamed, CopyMethod::cached, CopyMethod::streamed, CopyMethod::streamed})
        experience.add_measurement(method, 1000);
    CHECK(make(experience, CopyMethodSelector::kPeriod / 4, kApart) > 0);
}

void all_ranks_measure_the_same_method_in_the_same_calls() {
    CopyMethodSelector here, there;
    std::uint32_t measured = 0;
    for (std::uint32_t i = 0; i < CopyMethodSelector::kInitialCalls + 4 * CopyMethodSelector::kPeriod; ++i) {
        const auto [mine, is_mine] = here.next();
        const auto [theirs, is_theirs] = there.next();
        CHECK(is_mine == is_theirs);
        if (!is_mine) continue;
        CHECK(mine == theirs);
        here.add_measurement(mine, mine == CopyMethod::cached ? kShared.cached : kShared.streamed);
        there.add_measurement(theirs, theirs == CopyMethod::cached ? kApart.cached : kApart.streamed);
        ++measured;
    }
    CHECK(measured == 2 * CopyMethodSelector::kInitialCalls / CopyMethodSelector::kInitialPeriod + 2 * 4);
}

void a_streamed_copy_has_every_byte_and_no_other() {
    std::mt19937 random(7);
    std::vector<std::uint8_t> from(1024);
    for (std::uint8_t& byte : from) byte = static_cast<std::uint8_t>(random() | 1);
    for (std::size_t shift = 0; shift < 70; ++shift)
        for (const std::size_t nbytes : {0, 1, 15, 63, 64, 65, 127, 128, 200, 700}) {
            std::vector<std::uint8_t> to(1024);
            copy_streamed(to.data() + shift, from.data() + 2 * shift, nbytes);
            for (std::size_t at = 0; at < to.size(); ++at) {
                const bool is_within = at >= shift && at < shift + nbytes;
                CHECK(to[at] == (is_within ? from[at + shift] : 0));
            }
        }
}

}  // namespace

int main() {
    the_faster_method_is_used_also_after_the_ranks_have_moved();
    a_disturbed_measurement_does_not_change_the_method();
    all_ranks_measure_the_same_method_in_the_same_calls();
    a_streamed_copy_has_every_byte_and_no_other();
}
