// Tests the detection of NaN and infinity at every index of arrays of many lengths.
#include "reduce/finite.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "check.hpp"

namespace {

using namespace paceline;

template <typename T>
void one_is_found_wherever_it_is(DType dtype, T plain, const std::vector<T>& odd) {
    for (const std::size_t count : {1, 2, 31, 1024, 1500})
        for (std::size_t at = 0; at < count; at += count < 100 ? 1 : 97) {
            std::vector<T> values(count, plain);
            CHECK(are_finite(values.data(), count * sizeof(T), dtype));
            for (const T each : odd) {
                values[at] = each;
                CHECK(!are_finite(values.data(), count * sizeof(T), dtype));
                CHECK(are_finite(values.data(), at * sizeof(T), dtype));
            }
        }
}

void every_type_has_its_own_infinity() {
    one_is_found_wherever_it_is<float>(DType::f32, std::numeric_limits<float>::max(), {INFINITY, -INFINITY, NAN});
    one_is_found_wherever_it_is<double>(DType::f64, -std::numeric_limits<double>::max(), {INFINITY, -INFINITY, NAN});
    one_is_found_wherever_it_is<std::uint16_t>(DType::f16, 0x7bff, {0x7c00, 0xfc00, 0x7e00, 0x7c01});
    one_is_found_wherever_it_is<std::uint16_t>(DType::bf16, 0xff7f, {0x7f80, 0xff80, 0x7fc0, 0x7f81});
}

void an_array_may_be_aligned_badly() {
    std::vector<unsigned char> memory(4 * 100 + 1);
    const float odd = NAN;
    std::memcpy(memory.data() + 1 + 4 * 63, &odd, 4);
    CHECK(!are_finite(memory.data() + 1, 400, DType::f32));
    CHECK(are_finite(memory.data() + 1, 252, DType::f32));
}

void integers_are_finite() {
    const std::vector<std::uint8_t> ones(64, 0xff);
    CHECK(are_finite(ones.data(), ones.size(), DType::i32));
    CHECK(are_finite(nullptr, 0, DType::f32));
}

}  // namespace

int main() {
    every_type_has_its_own_infinity();
    an_array_may_be_aligned_badly();
    integers_are_finite();
}
