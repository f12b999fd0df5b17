// Reductions of n arrays to one, in an order fixed by rank. The sources are combined in a pairwise tree over their
// indices, for example ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), independently of the order of arrival. Results are
// therefore bitwise equal on every rank and in every run. float16 and bfloat16 are accumulated in float32 and rounded
// once. All SIMD levels round identically (without fused multiply-add).
#pragma once

#include <cstddef>
#include <cstdint>

namespace paceline {

enum class DType : std::uint8_t {
    boolean,
    u8,
    i8,
    u16,
    i16,
    u32,
    i32,
    u64,
    i64,
    f16,
    bf16,
    f32,
    f64,
    c64,
    c128,
    // Collectives can move the following types but not reduce them.
    f8_e4m3fn,
    f8_e5m2,
    f8_e4m3fnuz,
    f8_e5m2fnuz,
    f8_e8m0fnu,
    c32,
};

enum class ReduceOp : std::uint8_t { sum, avg, product, min, max, band, bor, bxor, premul_sum, none };

std::size_t item_size(DType dtype);

// out[i] = sources[0][i] op ... op sources[n - 1][i]; `out` may be one of the sources. `avg` divides by `divisor`, the
// number of ranks, which differs from n if the sum is computed in several steps. Integer sums wrap around; integer
// averages divide the wrapped sum and round toward zero.
using ReduceFn = void (*)(void* out, const void* const* sources, int n, std::size_t count, int divisor);

// Returns the fastest kernel that this machine can run; nullptr if the operation is not defined for the type.
ReduceFn find_reduction(DType dtype, ReduceOp op);

}  // namespace paceline
