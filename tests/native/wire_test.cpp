// Tests the wire formats: for any input, the rounding errors are within the specified bounds, and ranks that exchange
// packed blocks end with identical bits.
#include "wire/wire.hpp"

#include <cmath>
#include <cstring>
#include <limits>

#include "ranks.hpp"

namespace {

using namespace ranks;

using Flat = std::vector<std::int32_t>;

constexpr WireType kWires[] = {WireType::bf16, WireType::int8, WireType::int4};
constexpr SimdLevel kLevels[] = {SimdLevel::baseline, SimdLevel::avx2, SimdLevel::avx512};
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Returns the largest rounding error of `wire` in a group whose largest magnitude is `most`.
float bound(WireType wire, float most) {
    // Rounding up increases the scale by a factor of at most 1 + 2^-7.
    const float step = most / (wire == WireType::int8 ? 127.0F : 7.0F) * (1 + 1.0F / 128);
    return wire == WireType::bf16 ? most / 256 : step / 2 * (1 + 1e-5F);
}

std::vector<float> waves(std::size_t count, float scale = 1) {
    std::vector<float> values(count);
    for (std::size_t i = 0; i < count; ++i) values[i] = scale * std::sin(static_cast<float>(i * i + 1));
    return values;
}

// Returns the packed values in a vector of exactly the required size, so that a sanitizer detects writes past its end.
std::vector<std::uint8_t> packed(const WireKernels& kernels, WireType wire, const std::vector<float>& values,
                                 float* residual) {
    std::vector<std::uint8_t> bytes(packed_size(wire, values.size()), 0xee);
    kernels.pack(values.data(), residual, bytes.data(), values.size());
    return bytes;
}

void errors_are_bounded_and_kept_as_residuals() {
    for (const WireType wire : kWires)
        for (const SimdLevel level : kLevels) {
            const WireKernels* kernels = find_wire_kernels(wire, DType::f32, level);
            CHECK((kernels != nullptr) == has_simd(level));
            if (kernels == nullptr) continue;
            for (const std::size_t count : {0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 1000})
                for (const float scale : {1.0F, 1e-30F, 1e30F}) {
                    const std::vector<float> values = waves(count, scale);
                    std::vector<float> residual(count), out(count);
                    const auto bytes = packed(*kernels, wire, values, residual.data());
                    CHECK(bytes == packed(*kernels, wire, values, nullptr));
                    kernels->unpack(bytes.data(), out.data(), count);
                    for (std::size_t i = 0; i < count; ++i) {
                        CHECK(std::abs(values[i] - out[i]) <= bound(wire, scale));
                        CHECK(residual[i] == values[i] - out[i]);
                    }
                    std::vector<float> sum = values;
                    kernels->add(bytes.data(), sum.data(), count, 3);
                    for (std::size_t i = 0; i < count; ++i) CHECK(sum[i] == (values[i] + out[i]) / 3.0F);
                }
        }
}

void all_levels_pack_the_same_bits() {
    for (const WireType wire : kWires)
        for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
            const std::vector<float> values = waves(1000);  // narrower types use only its first bytes
            const WireKernels* plain = find_wire_kernels(wire, dtype, SimdLevel::baseline);
            std::vector<std::uint8_t> expected(packed_size(wire, 999));
            plain->pack(values.data(), nullptr, expected.data(), 999);
            for (const SimdLevel level : kLevels) {
                if (!has_simd(level)) continue;
                std::vector<std::uint8_t> bytes(expected.size());
                find_wire_kernels(wire, dtype, level)->pack(values.data(), nullptr, bytes.data(), 999);
                CHECK(bytes == expected);
            }
        }
}

void what_is_not_finite_stays_so_and_leaves_no_residual() {
    for (const WireType wire : kWires)
        for (const float odd : {kInfinity, -kInfinity, std::nanf(""), 3e38F}) {
            std::vector<float> values(100, 1.0F), residual(100), out(100);
            values[70] = odd;
            const WireKernels* kernels = find_wire_kernels(wire, DType::f32);
            const auto bytes = packed(*kernels, wire, values, residual.data());
            kernels->unpack(bytes.data(), out.data(), 100);
            for (std::size_t i = 0; i < 100; ++i) {
                CHECK(std::isfinite(residual[i]));
                if (wire == WireType::bf16 ? i != 70 : i < kWireGroup) CHECK(std::abs(out[i] - 1) < 0.1F);
                if (wire != WireType::bf16 && i >= kWireGroup) CHECK(std::isnan(out[i]));
            }
            if (wire == WireType::bf16 && odd != 3e38F) CHECK(std::isnan(odd) ? std::isnan(out[70]) : out[70] == odd);
        }
}

void tiny_values_accumulate_in_the_residuals() {
    for (const WireType wire : {WireType::int8, WireType::int4}) {
        const WireKernels* kernels = find_wire_kernels(wire, DType::f32);
        const std::vector<float> values(64, std::numeric_limits<float>::denorm_min());
        std::vector<float> residual(64), out(64, 1.0F);
        const auto bytes = packed(*kernels, wire, values, residual.data());
        kernels->unpack(bytes.data(), out.data(), 64);
        CHECK(out == std::vector<float>(64) && residual == values);
    }
    CHECK(find_wire_kernels(WireType::int8, DType::f64) == nullptr &&
          find_wire_kernels(WireType::none, DType::f32) == nullptr);
}

constexpr std::int32_t kSend = 0, kReceive = 1, kPack = 4, kUnpack = 5, kAdd = 6;
constexpr std::int32_t kOutput = 1, kWire = 3;

// Two hosts with one rank each. Each rank sends the other rank's half of the tensor to that rank, and then sends the
// packed sum of its own half.
std::shared_ptr<const Schedule> quantized_all_reduce(int rank, WireType wire) {
    const int other = 1 - rank;
    const Flat flat = {
        kPack,    0, -1,    kWire,   0,     1, kOutput, other, 1,  //
        kSend,    0, other, kOutput, 0,     0, kWire,   0,     1,  //
        kReceive, 0, other, kWire,   1,     1, kOutput, 0,     0,  //
        kAdd,     1, -1,    kOutput, rank,  1, kWire,   1,     1,  //
        kPack,    0, -1,    kWire,   2,     1, kOutput, rank,  1,  //
        kUnpack,  0, -1,    kOutput, rank,  1, kWire,   2,     1,  //
        kSend,    0, other, kOutput, 0,     0, kWire,   2,     1,  //
        kReceive, 0, other, kWire,   3,     1, kOutput, 0,     0,  //
        kUnpack,  0, -1,    kOutput, other, 1, kWire,   3,     1,
    };
    return Schedule::make(65, 2, rank, 2, flat, nullptr, wire);
}

// The tensor is a list of tensors with odd sizes that differ between the ranks, so that some groups span several
// tensors.
void ranks_end_with_equal_bits_and_small_errors(Over over, int streams) {
    for (const WireType wire : kWires)
        for (const std::size_t count : {0, 1, 63, 129, 10'007, 300'001}) {
            std::vector<float> results[2];
            with_ranks(2, streams, over, [&](Rank at) {
                std::vector<float> values = waves(count);
                std::vector<float> residual(count);
                std::vector<ByteRange> ranges;
                for (std::size_t from = 0, n = at.rank == 0 ? 3 : 1000; from < count; from += n, n = n * 7 % 4001) {
                    n = std::min(n, count - from);
                    ranges.push_back({reinterpret_cast<std::uint8_t*>(values.data() + from), n * sizeof(float)});
                }
                Call call;
                call.operation = Operation::all_reduce;
                call.dtype = DType::f32;
                call.reduce_op = ReduceOp::avg;
                call.count = count;
                call.timeout_ns = kHung;
                call.outputs.emplace_back(std::move(ranges));
                call.residual = residual.data();
                call.residual_count = count;
                call.schedule = quantized_all_reduce(at.rank, wire);
                CHECK(call.schedule != nullptr);
                CHECK(at.executor.run(call, nullptr, false).code == OutcomeCode::ok);
                results[at.rank] = std::move(values);
            });
            CHECK(results[0].size() == count && results[1].size() == count);
            if (count != 0) CHECK(std::memcmp(results[0].data(), results[1].data(), count * sizeof(float)) == 0);
            const std::vector<float> exact = waves(count);
            for (std::size_t i = 0; i < count; ++i) CHECK(std::abs(results[0][i] - exact[i]) <= 2 * bound(wire, 1));
        }
}

void calls_that_cannot_be_packed_are_refused() {
    with_ranks(2, 1, Over::sockets, [](Rank at) {
        std::vector<double> values(10);
        Call call;
        call.operation = Operation::all_reduce;
        call.dtype = DType::f64;
        call.reduce_op = ReduceOp::sum;
        call.count = values.size();
        call.timeout_ns = kHung;
        call.outputs.push_back(stream_of(values));
        call.schedule = quantized_all_reduce(at.rank, WireType::int8);
        CHECK(at.executor.run(call, nullptr, false).code == OutcomeCode::schedule_unfit);
        std::vector<float> floats(10), residual(9);
        call.dtype = DType::f32;
        call.outputs = {stream_of(floats)};
        call.residual = residual.data();
        call.residual_count = residual.size();  // one value too few
        CHECK(at.executor.run(call, nullptr, false).code == OutcomeCode::schedule_unfit);
    });
    CHECK(quantized_all_reduce(0, WireType::none) == nullptr);
}

}  // namespace

int main() {
    errors_are_bounded_and_kept_as_residuals();
    all_levels_pack_the_same_bits();
    what_is_not_finite_stays_so_and_leaves_no_residual();
    tiny_values_accumulate_in_the_residuals();
    for (const int streams : {1, 3}) ranks_end_with_equal_bits_and_small_errors(Over::sockets, streams);
    ranks_end_with_equal_bits_and_small_errors(Over::rings, 1);
    calls_that_cannot_be_packed_are_refused();
}
