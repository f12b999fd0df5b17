// The elements of a reduction: their types, loads and stores, the reductions of two values, and the division for
// averages. kernels.inl includes this file once for each SIMD level; its rule about templates applies here as well.

namespace paceline::PACELINE_SIMD {
namespace {

struct Half {
    std::uint16_t bits;
};
struct BFloat {
    std::uint16_t bits;
};
struct Boolean {
    std::uint8_t value;
};
template <class Real>
struct Complex {
    Real re, im;
};

inline float as_float(std::uint32_t bits) {
    return __builtin_bit_cast(float, bits);
}
inline std::uint32_t as_bits(float value) {
    return __builtin_bit_cast(std::uint32_t, value);
}

// Defines the accumulation type for values of T, and their loads and stores.
template <class T>
struct ElementTraits {
    using Acc = T;
    static T load(T value) { return value; }
    static T store(T value) { return value; }
};
template <>
struct ElementTraits<BFloat> {
    using Acc = float;
    static float load(BFloat value) { return as_float(static_cast<std::uint32_t>(value.bits) << 16); }
    static BFloat store(float value) {
        const std::uint32_t bits = as_bits(value);
        const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
        return {static_cast<std::uint16_t>(nan ? 0x7fc0u : rounded)};
    }
};
template <>
struct ElementTraits<Half> {
    using Acc = float;
    static float load(Half value) {
        // A multiplication adjusts the exponent and also normalizes subnormals; inf and nan are corrected afterward.
        const std::uint32_t magnitude = static_cast<std::uint32_t>(value.bits & 0x7fffu) << 13;
        const std::uint32_t scaled = as_bits(as_float(magnitude) * as_float(0x77800000u));
        const std::uint32_t special = magnitude | 0x7f800000u;
        const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
        return as_float((magnitude >= 0x0f800000u ? special : scaled) | sign);
    }
    static Half store(float value) {
        const std::uint32_t bits = as_bits(value);
        const std::uint32_t sign = (bits >> 16) & 0x8000u;
        const std::uint32_t magnitude = bits & 0x7fffffffu;
        // For subnormal results, adding 0.5 aligns the mantissa for the hardware's rounding to nearest even.
        const std::uint32_t subnormal = as_bits(as_float(magnitude) + 0.5f) - 0x3f000000u;
        const std::uint32_t odd = (magnitude >> 13) & 1u;
        const std::uint32_t normal = (magnitude - 0x38000000u + 0xfffu + odd) >> 13;
        const std::uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
        const std::uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
        return {static_cast<std::uint16_t>(sign | (magnitude >= 0x477ff000u ? special : finite))};
    }
};

template <>
struct ElementTraits<Complex<Half>> {
    using Acc = Complex<float>;
    static Acc load(Complex<Half> value) {
        return {ElementTraits<Half>::load(value.re), ElementTraits<Half>::load(value.im)};
    }
    static Complex<Half> store(Acc value) {
        return {ElementTraits<Half>::store(value.re), ElementTraits<Half>::store(value.im)};
    }
};

// Integers use unsigned arithmetic because overflow must wrap as in PyTorch.
template <class T>
struct WrappingType {
    using Type = T;
};
template <>
struct WrappingType<std::int8_t> {
    using Type = std::uint8_t;
};
template <>
struct WrappingType<std::int16_t> {
    using Type = std::uint32_t;
};
template <>
struct WrappingType<std::uint16_t> {
    using Type = std::uint32_t;
};
template <>
struct WrappingType<std::int32_t> {
    using Type = std::uint32_t;
};
template <>
struct WrappingType<std::int64_t> {
    using Type = std::uint64_t;
};

struct Sum {
    template <class T>
    static T apply(T a, T b) {
        using W = typename WrappingType<T>::Type;
        return static_cast<T>(static_cast<W>(a) + static_cast<W>(b));
    }
    template <class R>
    static Complex<R> apply(Complex<R> a, Complex<R> b) {
        return {a.re + b.re, a.im + b.im};
    }
    static Boolean apply(Boolean a, Boolean b) { return {static_cast<std::uint8_t>((a.value | b.value) != 0)}; }
};
struct Product {
    template <class T>
    static T apply(T a, T b) {
        using W = typename WrappingType<T>::Type;
        return static_cast<T>(static_cast<W>(a) * static_cast<W>(b));
    }
    template <class R>
    static Complex<R> apply(Complex<R> a, Complex<R> b) {
        return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
    }
    static Boolean apply(Boolean a, Boolean b) { return {static_cast<std::uint8_t>((a.value != 0) & (b.value != 0))}; }
};
// If either operand is nan, the result is nan, as in torch.minimum and torch.maximum.
struct Min {
    template <class T>
    static T apply(T a, T b) {
        return (a < b || a != a) ? a : b;
    }
    static Boolean apply(Boolean a, Boolean b) { return Product::apply(a, b); }
};
struct Max {
    template <class T>
    static T apply(T a, T b) {
        return (a > b || a != a) ? a : b;
    }
    static Boolean apply(Boolean a, Boolean b) { return Sum::apply(a, b); }
};
struct BitAnd {
    template <class T>
    static T apply(T a, T b) {
        return static_cast<T>(a & b);
    }
    static Boolean apply(Boolean a, Boolean b) { return Product::apply(a, b); }
};
struct BitOr {
    template <class T>
    static T apply(T a, T b) {
        return static_cast<T>(a | b);
    }
    static Boolean apply(Boolean a, Boolean b) { return Sum::apply(a, b); }
};
struct BitXor {
    template <class T>
    static T apply(T a, T b) {
        return static_cast<T>(a ^ b);
    }
    static Boolean apply(Boolean a, Boolean b) { return {static_cast<std::uint8_t>((a.value != 0) != (b.value != 0))}; }
};

template <class T>
struct NoDivision {
    static T finish(T value, int) { return value; }
};
// Integer quotients are rounded toward zero, as in NCCL. A narrow type may not be able to represent n.
template <class T>
struct Divide {
    static T finish(T value, int n) { return static_cast<T>(value / static_cast<T>(n)); }
};
template <>
struct Divide<std::int8_t> {
    static std::int8_t finish(std::int8_t value, int n) { return static_cast<std::int8_t>(value / n); }
};
template <>
struct Divide<std::uint8_t> {
    static std::uint8_t finish(std::uint8_t value, int n) { return static_cast<std::uint8_t>(value / n); }
};
template <>
struct Divide<std::int16_t> {
    static std::int16_t finish(std::int16_t value, int n) { return static_cast<std::int16_t>(value / n); }
};
template <>
struct Divide<std::uint16_t> {
    static std::uint16_t finish(std::uint16_t value, int n) { return static_cast<std::uint16_t>(value / n); }
};
template <class R>
struct Divide<Complex<R>> {
    static Complex<R> finish(Complex<R> value, int n) {
        return {value.re / static_cast<R>(n), value.im / static_cast<R>(n)};
    }
};

// If the divisor is a power of two, multiplication by its reciprocal produces the same result and is several times
// faster.
template <class T>
struct Scale {
    static T finish(T value, int n) { return value * (T{1} / static_cast<T>(n)); }
};
template <class R>
struct Scale<Complex<R>> {
    static Complex<R> finish(Complex<R> value, int n) {
        const R factor = R{1} / static_cast<R>(n);
        return {value.re * factor, value.im * factor};
    }
};

}  // namespace
}  // namespace paceline::PACELINE_SIMD
