// Tests that the reduction kernels give the same results as a plain implementation of the same tree.
#include "reduce/reduce.hpp"

#include <cmath>
#include <vector>

#include "check.hpp"

namespace {

using namespace paceline;

float tree(const std::vector<std::vector<float>>& values, std::size_t at, std::size_t low, std::size_t high) {
    if (high - low == 1) return values[low][at];
    std::size_t half = 1;
    while (half * 2 < high - low) half *= 2;
    return tree(values, at, low, low + half) + tree(values, at, low + half, high);
}

void sums_follow_the_pairwise_tree() {
    for (std::size_t n = 1; n <= 9; ++n)
        for (const std::size_t count : {1, 7, 1023, 1024, 5000}) {
            std::vector<std::vector<float>> values(n, std::vector<float>(count));
            std::vector<const void*> sources;
            for (std::size_t r = 0; r < n; ++r) {
                for (std::size_t i = 0; i < count; ++i) values[r][i] = std::sin(static_cast<float>(r * count + i));
                sources.push_back(values[r].data());
            }
            std::vector<float> sum(count), mean(count);
            find_reduction(DType::f32, ReduceOp::sum)(sum.data(), sources.data(), static_cast<int>(n), count,
                                                      static_cast<int>(n));
            find_reduction(DType::f32, ReduceOp::avg)(mean.data(), sources.data(), static_cast<int>(n), count,
                                                      static_cast<int>(n));
            for (std::size_t i = 0; i < count; ++i) {
                CHECK(sum[i] == tree(values, i, 0, n));
                CHECK(mean[i] == sum[i] / static_cast<float>(n));
            }
        }
}

void half_precision_sums_are_rounded_once() {
    const std::uint16_t one = 0x3c00, tiny = 0x1000;  // 1 and 2^-11: 1 + 2^-11 rounds to 1, but 1 + 2 * 2^-11 does not
    const void* sources[] = {&tiny, &tiny, &one};
    std::uint16_t sum = 0;
    find_reduction(DType::f16, ReduceOp::sum)(&sum, sources, 3, 1, 3);
    CHECK(sum == 0x3c01);
    const std::uint16_t infinite = 0x7c00;
    const void* overflow[] = {&infinite, &one};
    find_reduction(DType::f16, ReduceOp::sum)(&sum, overflow, 2, 1, 2);
    CHECK(sum == infinite);
}

void averages_of_integers_drop_the_fraction() {
    const std::int8_t a[] = {-7, 7, 127, -128}, b[] = {0, 0, 127, -128};
    const void* sources[] = {a, b};
    std::int8_t mean[4];
    find_reduction(DType::i8, ReduceOp::avg)(mean, sources, 2, 4, 2);
    CHECK(mean[0] == -3 && mean[1] == 3 && mean[2] == -1 && mean[3] == 0);  // the last two sums wrapped
    find_reduction(DType::i8, ReduceOp::avg)(mean, sources, 2, 4, 200);     // more ranks than i8 can hold
    CHECK(mean[0] == 0 && mean[1] == 0);
    const std::uint64_t large[] = {1ull << 63}, three[] = {3};
    const void* unsigned_sources[] = {large, three};
    std::uint64_t unsigned_mean = 0;
    find_reduction(DType::u64, ReduceOp::avg)(&unsigned_mean, unsigned_sources, 2, 1, 2);
    CHECK(unsigned_mean == (1ull << 62) + 1);
}

void undefined_reductions_are_not_found() {
    CHECK(find_reduction(DType::boolean, ReduceOp::avg) == nullptr);
    CHECK(find_reduction(DType::f32, ReduceOp::bxor) == nullptr);
    CHECK(find_reduction(DType::c64, ReduceOp::max) == nullptr);
    CHECK(find_reduction(DType::f8_e4m3fn, ReduceOp::sum) == nullptr);
    CHECK(find_reduction(DType::boolean, ReduceOp::bxor) != nullptr);
}

}  // namespace

int main() {
    sums_follow_the_pairwise_tree();
    half_precision_sums_are_rounded_once();
    averages_of_integers_drop_the_fraction();
    undefined_reductions_are_not_found();
}
