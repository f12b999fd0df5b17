// Tests which step lists are accepted as a schedule.
#include "executor/schedule.hpp"

#include <algorithm>

#include "check.hpp"

namespace {

using namespace paceline::executor;
using Flat = std::vector<std::int32_t>;

constexpr int kRank = 0, kSize = 4;
constexpr std::int32_t kInput = 0, kOutput = 1, kScratch = 2;
constexpr std::int32_t kSend = 0, kReceive = 1, kReduce = 2, kCopy = 3;

bool is_schedule(const Flat& flat, std::uint32_t blocks = kSize, int size = kSize) {
    return Schedule::make(1, blocks, kRank, size, flat) != nullptr;
}

Flat joined(std::initializer_list<Flat> steps) {
    Flat flat;
    for (const Flat& step : steps) flat.insert(flat.end(), step.begin(), step.end());
    return flat;
}

Flat send(std::int32_t peer, std::int32_t buffer, std::int32_t first, std::int32_t count) {
    return {kSend, 0, peer, kOutput, 0, 0, buffer, first, count};
}

void an_empty_list_of_steps_is_a_schedule() {
    CHECK(is_schedule({}));
}

void malformed_steps_are_refused() {
    const Flat good = {kReduce, 1, 1, kOutput, 0, 2, kOutput, 0, 2};
    CHECK(is_schedule(good));
    for (std::size_t length = 1; length < good.size(); ++length)
        CHECK(!is_schedule(Flat(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(length))));
    struct Change {
        std::size_t at;
        std::int32_t to;
    };
    constexpr std::int32_t kMax = 0x7fffffff, kMin = -kMax - 1;
    for (const Change change :
         {Change{0, 4}, {0, -1},    {0, kMax},   {0, kCopy},             // kind; a copy has no peer
          {2, -1},      {2, kSize}, {2, kRank},  {2, kMax},  {2, kMin},  // peer
          {3, 3},       {3, -1},    {3, kInput}, {6, 3},     {6, kMin},  // buffer; the input is read-only
          {4, -1},      {4, kMax},  {5, -1},     {5, kMax},  {5, 1},    {7, kMin}, {8, kMax}, {8, 3}}) {
        Flat bad = good;
        bad[change.at] = change.to;
        CHECK(!is_schedule(bad));
    }
    CHECK(!is_schedule({kCopy, 0, 1, kOutput, 0, 1, kInput, 0, 1}));
    CHECK(is_schedule({kCopy, 0, -1, kOutput, 0, 1, kInput, 0, 1}));
    CHECK(!is_schedule(good, 1u << 31) && !is_schedule(good, 0xffffffff));
    CHECK(!Schedule::make(1, kSize, -1, kSize, good) && !Schedule::make(1, kSize, kSize, kSize, good));
    CHECK(!is_schedule(good, kSize, 0) && !is_schedule(good, kSize, -1) && !is_schedule(good, kSize, 1));
}

void steps_are_assigned_to_flows_in_order() {
    const auto schedule = Schedule::make(3, 4, kRank, kSize,
                                         joined({send(1, kOutput, 0, 1),
                                                 {kReceive, 0, 2, kScratch, 5, 2, kOutput, 0, 0},
                                                 {kCopy, 0, -1, kOutput, 1, 1, kScratch, 5, 1},
                                                 send(1, kOutput, 1, 1)}));
    CHECK(schedule && schedule->algorithm == 3 && schedule->scratch_blocks == 7);
    CHECK(schedule->flows.size() == 2 && schedule->flows[0].peer == 1 && schedule->flows[1].peer == 2);
    CHECK((schedule->flows[0].sends == std::vector<std::uint32_t>{0, 3}));
    CHECK((schedule->flows[1].receives == std::vector<std::uint32_t>{1}));
    CHECK((schedule->local == std::vector<std::uint32_t>{2}));
}

std::vector<std::uint32_t> on(const Schedule& schedule, std::uint32_t step) {
    std::vector<std::uint32_t> steps;
    for (const Dependency& each : schedule.dependencies(step)) steps.push_back(each.step);
    return steps;
}

void a_step_depends_on_earlier_steps_with_the_same_blocks() {
    using Steps = std::vector<std::uint32_t>;
    const auto schedule = Schedule::make(1, 4, kRank, kSize,
                                         joined({{kReceive, 0, 1, kOutput, 0, 2, kOutput, 0, 0},    // 0 writes 0, 1
                                                 send(2, kOutput, 1, 2),                            // 1 reads 1, 2
                                                 {kReceive, 0, 1, kOutput, 2, 1, kOutput, 0, 0},    // 2 writes 2
                                                 {kReceive, 0, 3, kOutput, 0, 1, kOutput, 0, 0},    // 3 writes 0
                                                 {kCopy, 0, -1, kOutput, 3, 1, kInput, 0, 1},       // 4 writes 3
                                                 {kReduce, 0, 3, kOutput, 0, 4, kOutput, 0, 4}}));  // 5 all
    CHECK(schedule);
    CHECK(on(*schedule, 0).empty());
    CHECK(on(*schedule, 1) == Steps{0});
    CHECK(on(*schedule, 2) == Steps{1});
    CHECK(on(*schedule, 3) == Steps{0});
    CHECK(on(*schedule, 4).empty());
    for (const std::uint32_t step : {0u, 2u, 3u, 4u}) {
        const Steps of_5 = on(*schedule, 5);
        CHECK(std::find(of_5.begin(), of_5.end(), step) != of_5.end());
    }
}

}  // namespace

int main() {
    an_empty_list_of_steps_is_a_schedule();
    malformed_steps_are_refused();
    steps_are_assigned_to_flows_in_order();
    a_step_depends_on_earlier_steps_with_the_same_blocks();
}
