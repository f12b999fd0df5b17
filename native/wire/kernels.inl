// The kernels for wire.hpp, compiled once for each SIMD level. Like the reduction kernels, they use only plain loops
// (see reduce/kernels.inl).

#include "reduce/elements.inl"

namespace paceline::PACELINE_SIMD {
namespace {

constexpr std::size_t kGroup = kWireGroup;

// Adding 1.5 * 2^23 to a float with a magnitude below 2^22 rounds it to the nearest integer (ties to even). The integer
// is then in the low bits.
constexpr float kRounder = 12582912.0F;
constexpr std::uint32_t kRounderBits = 0x4b400000U;

constexpr std::int32_t kTooLarge = 0x7f000000;  // the bits of 2^127; infinity and NaN have larger bits
constexpr std::int32_t kTooSmall = 0x08800000;  // the bits of 2^-110, the smallest magnitude with a normal scale

struct BFloatFormat {
    static constexpr std::size_t kPacked = packed_group(WireType::bf16);

    static void encode(const float* values, float* lost, std::uint8_t* packed) {
        BFloat* out = reinterpret_cast<BFloat*>(packed);
        for (std::size_t i = 0; i < kGroup; ++i) {
            out[i] = ElementTraits<BFloat>::store(values[i]);
            const float rest = values[i] - ElementTraits<BFloat>::load(out[i]);
            lost[i] = (as_bits(rest) & 0x7fffffffU) < 0x7f800000U ? rest : 0.0F;
        }
    }
    static void decode(const std::uint8_t* packed, float* values) {
        const BFloat* in = reinterpret_cast<const BFloat*>(packed);
        for (std::size_t i = 0; i < kGroup; ++i) values[i] = ElementTraits<BFloat>::load(in[i]);
    }
};

struct PackedInt8 {
    static constexpr std::size_t kPacked = packed_group(WireType::int8);
    static constexpr float kLevels = 127.0F;

    static void put(const std::int32_t* integers, std::uint8_t* out) {
        for (std::size_t i = 0; i < kGroup; ++i) out[i] = static_cast<std::uint8_t>(integers[i]);
    }
    static void get(const std::uint8_t* in, float scale, float* values) {
        for (std::size_t i = 0; i < kGroup; ++i)
            values[i] = static_cast<float>(static_cast<std::int8_t>(in[i])) * scale;
    }
};

// int4: the low bits of a byte contain an element from the first half of the group, the high bits one from the second
// half.
struct PackedInt4 {
    static constexpr std::size_t kPacked = packed_group(WireType::int4);
    static constexpr float kLevels = 7.0F;
    static constexpr std::size_t kHalf = kGroup / 2;

    static void put(const std::int32_t* integers, std::uint8_t* out) {
        for (std::size_t i = 0; i < kHalf; ++i)
            out[i] = static_cast<std::uint8_t>((integers[i] + 8) | ((integers[i + kHalf] + 8) << 4));
    }
    static void get(const std::uint8_t* in, float scale, float* values) {
        for (std::size_t i = 0; i < kHalf; ++i) {
            values[i] = static_cast<float>((in[i] & 15) - 8) * scale;
            values[i + kHalf] = static_cast<float>((in[i] >> 4) - 8) * scale;
        }
    }
};

// A group of integers preceded by their common scale.
template <class Integers>
struct ScaledFormat {
    static constexpr std::size_t kPacked = Integers::kPacked;

    static void encode(const float* values, float* lost, std::uint8_t* packed) {
        std::int32_t most =
            0;  // the largest magnitude; the bits of magnitudes, as integers, are ordered like the floats
        for (std::size_t i = 0; i < kGroup; ++i) {
            const auto magnitude = static_cast<std::int32_t>(as_bits(values[i]) & 0x7fffffffU);
            most = magnitude > most ? magnitude : most;
        }
        const bool is_usual = most >= kTooSmall && most < kTooLarge;
        const float exact = as_float(static_cast<std::uint32_t>(is_usual ? most : 0x3f800000)) / Integers::kLevels;
        const std::uint32_t scale_bits = (as_bits(exact) + 0xffffU) & 0xffff0000U;
        const float scale = as_float(scale_bits);
        const float inverse = 1.0F / scale;
        std::int32_t integers[kGroup];
        if (!is_usual) {
            for (std::size_t i = 0; i < kGroup; ++i) {
                integers[i] = 0;
                lost[i] = most < kTooSmall ? values[i] : 0.0F;
            }
            put_scale(packed, most < kTooSmall ? 0 : 0x7fc00000U);
        } else {
            for (std::size_t i = 0; i < kGroup; ++i) {
                const float shifted = values[i] * inverse + kRounder;
                integers[i] = static_cast<std::int32_t>(as_bits(shifted) - kRounderBits);
                lost[i] = values[i] - (shifted - kRounder) * scale;
            }
            put_scale(packed, scale_bits);
        }
        Integers::put(integers, packed + 2);
    }
    static void decode(const std::uint8_t* packed, float* values) {
        const std::uint32_t low = packed[0];
        const std::uint32_t high = packed[1];
        Integers::get(packed + 2, as_float(low << 16 | high << 24), values);
    }

  private:
    static void put_scale(std::uint8_t* packed, std::uint32_t bits) {
        packed[0] = static_cast<std::uint8_t>(bits >> 16);
        packed[1] = static_cast<std::uint8_t>(bits >> 24);
    }
};

// `length` is a compile-time constant in all groups except the last, so the compiler can unroll the loops.
template <class T, class Format>
inline void pack_group(const T* source, float* residual, std::uint8_t* packed, std::size_t length) {
    float values[kGroup];
    float lost[kGroup];
    for (std::size_t i = length; i < kGroup; ++i) values[i] = 0.0F;
    if (residual == nullptr) {
        for (std::size_t i = 0; i < length; ++i) values[i] = ElementTraits<T>::load(source[i]);
        Format::encode(values, lost, packed);
        return;
    }
    for (std::size_t i = 0; i < length; ++i) values[i] = ElementTraits<T>::load(source[i]) + residual[i];
    Format::encode(values, lost, packed);
    for (std::size_t i = 0; i < length; ++i) residual[i] = lost[i];
}

template <class T, class Format>
void pack(const void* from, float* residual, std::uint8_t* packed, std::size_t count) {
    const T* source = static_cast<const T*>(from);
    for (; count >= kGroup; count -= kGroup, source += kGroup, packed += Format::kPacked) {
        pack_group<T, Format>(source, residual, packed, kGroup);
        if (residual != nullptr) residual += kGroup;
    }
    if (count != 0) pack_group<T, Format>(source, residual, packed, count);
}

template <class T, class Format>
void unpack(const std::uint8_t* packed, void* into, std::size_t count) {
    T* tensor = static_cast<T*>(into);
    float values[kGroup];
    for (; count >= kGroup; count -= kGroup, tensor += kGroup, packed += Format::kPacked) {
        Format::decode(packed, values);
        for (std::size_t i = 0; i < kGroup; ++i) tensor[i] = ElementTraits<T>::store(values[i]);
    }
    if (count == 0) return;
    Format::decode(packed, values);
    for (std::size_t i = 0; i < count; ++i) tensor[i] = ElementTraits<T>::store(values[i]);
}

template <class T, class Format, class Finish>
void add_and_finish(const std::uint8_t* packed, T* tensor, std::size_t count, int divisor) {
    float values[kGroup];
    for (; count >= kGroup; count -= kGroup, tensor += kGroup, packed += Format::kPacked) {
        Format::decode(packed, values);
        for (std::size_t i = 0; i < kGroup; ++i)
            tensor[i] = ElementTraits<T>::store(Finish::finish(ElementTraits<T>::load(tensor[i]) + values[i], divisor));
    }
    if (count == 0) return;
    Format::decode(packed, values);
    for (std::size_t i = 0; i < count; ++i)
        tensor[i] = ElementTraits<T>::store(Finish::finish(ElementTraits<T>::load(tensor[i]) + values[i], divisor));
}

template <class T, class Format>
void add(const std::uint8_t* packed, void* into, std::size_t count, int divisor) {
    T* tensor = static_cast<T*>(into);
    if (divisor == 1)
        add_and_finish<T, Format, NoDivision<float>>(packed, tensor, count, divisor);
    else if ((divisor & (divisor - 1)) == 0)
        add_and_finish<T, Format, Scale<float>>(packed, tensor, count, divisor);
    else
        add_and_finish<T, Format, Divide<float>>(packed, tensor, count, divisor);
}

template <class T, class Format>
constexpr WireKernels kernels_of = {&pack<T, Format>, &unpack<T, Format>, &add<T, Format>};

template <class T>
const WireKernels* kernels_for(WireType wire) {
    switch (wire) {
        case WireType::bf16:
            return &kernels_of<T, BFloatFormat>;
        case WireType::int8:
            return &kernels_of<T, ScaledFormat<PackedInt8>>;
        case WireType::int4:
            return &kernels_of<T, ScaledFormat<PackedInt4>>;
        case WireType::none:
            break;
    }
    return nullptr;
}

}  // namespace

const WireKernels* find_wire(WireType wire, DType dtype) {
    switch (dtype) {
        case DType::f32:
            return kernels_for<float>(wire);
        case DType::f16:
            return kernels_for<Half>(wire);
        case DType::bf16:
            return kernels_for<BFloat>(wire);
        default:
            return nullptr;
    }
}

}  // namespace paceline::PACELINE_SIMD
