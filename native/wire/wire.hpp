// Wire formats for float tensors sent between hosts: bfloat16, or 8-bit or 4-bit integers with a scale for each group.
//
// A tensor is packed in groups of kWireGroup elements. The last group may have fewer elements but takes the same number
// of bytes. An int8 or int4 group starts with its bfloat16 scale, rounded up to make the largest magnitude at most 127
// (int8) or 7 (int4) times the scale. The product of scale and integer is exact in float32. Unpacking therefore rounds
// only to dtypes narrower than float32, and all SIMD levels produce identical bits. An int8 or int4 group that contains
// NaN, infinity or a magnitude of 2^127 or more is unpacked as NaN; a group whose magnitudes are all below 2^-110 is
// unpacked as zeros. The conversion to bfloat16 follows IEEE 754 and rounds to the nearest value (ties to even).
#pragma once

#include <cstddef>
#include <cstdint>

#include "reduce/reduce.hpp"
#include "reduce/simd.hpp"

namespace paceline {

enum class WireType : std::uint8_t { none, bf16, int8, int4 };

constexpr std::size_t kWireGroup = 64;

constexpr std::size_t packed_group(WireType wire) {
    switch (wire) {
        case WireType::bf16:
            return 2 * kWireGroup;
        case WireType::int8:
            return 2 + kWireGroup;
        case WireType::int4:
            return 2 + kWireGroup / 2;
        case WireType::none:
            break;
    }
    return 0;
}

// Returns the size in bytes of `count` packed elements, which is always even.
constexpr std::size_t packed_size(WireType wire, std::size_t count) {
    return (count + kWireGroup - 1) / kWireGroup * packed_group(wire);
}

struct WireKernels {
    // Packs `count` elements of `source`. If `residual` is not null, it is first added to the elements and then set to
    // their rounding errors, which are zero for elements that are not finite.
    void (*pack)(const void* source, float* residual, std::uint8_t* packed, std::size_t count);
    void (*unpack)(const std::uint8_t* packed, void* tensor, std::size_t count);
    // Adds the packed elements to the tensor and divides the sums by `divisor`.
    void (*add)(const std::uint8_t* packed, void* tensor, std::size_t count, int divisor);
};

// Returns nullptr for Wire::none, for dtypes other than float32, float16 and bfloat16, and for SIMD levels that this
// machine does not support.
const WireKernels* find_wire_kernels(WireType wire, DType dtype, SimdLevel level = best_simd());

}  // namespace paceline
