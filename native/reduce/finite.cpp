#include "reduce/finite.hpp"

#include <algorithm>
#include <cstring>

namespace paceline {
namespace {

constexpr std::size_t kBlockBytes = 2048;

// In every IEEE format, NaN and infinity are the values whose exponent bits are all ones.
template <typename Bits>
bool have_finite_exponents(const unsigned char* data, std::size_t nbytes, Bits exponent) {
    constexpr std::size_t kBlock = kBlockBytes / sizeof(Bits);
    Bits block[kBlock];
    while (nbytes >= sizeof(Bits)) {
        const std::size_t count = std::min(nbytes / sizeof(Bits), kBlock);
        std::memcpy(block, data, count * sizeof(Bits));  // the array may be less aligned than its elements require
        Bits found = 0;
        for (std::size_t i = 0; i < count; ++i)
            found = static_cast<Bits>(found | static_cast<Bits>((block[i] & exponent) == exponent ? 1 : 0));
        if (found != 0) return false;
        data += count * sizeof(Bits);
        nbytes -= count * sizeof(Bits);
    }
    return true;
}

}  // namespace

bool are_finite(const void* data, std::size_t nbytes, DType dtype) {
    const auto* bytes = static_cast<const unsigned char*>(data);
    switch (dtype) {
        case DType::f16:
        case DType::c32:
            return have_finite_exponents<std::uint16_t>(bytes, nbytes, 0x7c00);
        case DType::bf16:
            return have_finite_exponents<std::uint16_t>(bytes, nbytes, 0x7f80);
        case DType::f32:
        case DType::c64:
            return have_finite_exponents<std::uint32_t>(bytes, nbytes, 0x7f800000);
        case DType::f64:
        case DType::c128:
            return have_finite_exponents<std::uint64_t>(bytes, nbytes, 0x7ff0000000000000);
        default:
            return true;
    }
}

}  // namespace paceline
