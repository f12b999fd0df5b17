// The kernels, compiled once for each SIMD level: the including file names the namespace in PACELINE_SIMD. They use
// plain loops and no library templates, because the linker could otherwise use an instantiation compiled for a newer
// CPU in code for older CPUs.

#include "reduce/elements.inl"

// Declares that the iterations of the following loop are independent. With Clang, a check at run time determines
// whether the arrays overlap.
#if defined(__clang__)
#define PACELINE_INDEPENDENT
#else
#define PACELINE_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace paceline::PACELINE_SIMD {
namespace {

constexpr std::size_t kTile = 1024;  // number of elements; the tiles of the deepest tree fit in the L1 cache

template <class T, class Op>
struct PairwiseTree {
    using N = ElementTraits<T>;
    using Acc = typename N::Acc;

    // Computes dst = sources[low] op ... op sources[high - 1] for one tile.
    [[gnu::noinline]] static void combine(const T* const* sources, int low, int high, std::size_t at, std::size_t count,
                                          Acc* dst) {
        const T* first = sources[low] + at;
        if (high - low == 1) {
            for (std::size_t i = 0; i < count; ++i) dst[i] = N::load(first[i]);
            return;
        }
        if (high - low == 2) {
            const T* second = sources[low + 1] + at;
            PACELINE_INDEPENDENT
            for (std::size_t i = 0; i < count; ++i) dst[i] = Op::apply(N::load(first[i]), N::load(second[i]));
            return;
        }
        int half = 1;
        while (half * 2 < high - low) half *= 2;
        Acc other[kTile];
        combine(sources, low, low + half, at, count, dst);
        combine(sources, low + half, high, at, count, other);
        PACELINE_INDEPENDENT
        for (std::size_t i = 0; i < count; ++i) dst[i] = Op::apply(dst[i], other[i]);
    }

    template <class Finish>
    static void reduce(void* out_bytes, const void* const* source_bytes, int n, std::size_t count, int divisor) {
        T* out = static_cast<T*>(out_bytes);
        const T* const* sources = reinterpret_cast<const T* const*>(source_bytes);
        if (n == 2) {
            const T* a = sources[0];
            const T* b = sources[1];
            PACELINE_INDEPENDENT
            for (std::size_t i = 0; i < count; ++i)
                out[i] = N::store(Finish::finish(Op::apply(N::load(a[i]), N::load(b[i])), divisor));
            return;
        }
        for (std::size_t at = 0; at < count; at += kTile) {
            const std::size_t length = count - at < kTile ? count - at : kTile;
            Acc tile[kTile];
            combine(sources, 0, n, at, length, tile);
            PACELINE_INDEPENDENT
            for (std::size_t i = 0; i < length; ++i) out[at + i] = N::store(Finish::finish(tile[i], divisor));
        }
    }
};

template <class T, class Op>
constexpr ReduceFn kernel = &PairwiseTree<T, Op>::template reduce<NoDivision<typename ElementTraits<T>::Acc>>;
template <class T>
void average(void* out, const void* const* sources, int n, std::size_t count, int divisor) {
    using Acc = typename ElementTraits<T>::Acc;
    if ((divisor & (divisor - 1)) == 0)
        PairwiseTree<T, Sum>::template reduce<Scale<Acc>>(out, sources, n, count, divisor);
    else
        PairwiseTree<T, Sum>::template reduce<Divide<Acc>>(out, sources, n, count, divisor);
}

template <class T>
ReduceFn for_bits(ReduceOp op) {
    switch (op) {
        case ReduceOp::sum:
        case ReduceOp::premul_sum:
            return kernel<T, Sum>;
        case ReduceOp::product:
            return kernel<T, Product>;
        case ReduceOp::min:
            return kernel<T, Min>;
        case ReduceOp::max:
            return kernel<T, Max>;
        case ReduceOp::band:
            return kernel<T, BitAnd>;
        case ReduceOp::bor:
            return kernel<T, BitOr>;
        case ReduceOp::bxor:
            return kernel<T, BitXor>;
        default:
            return nullptr;
    }
}

template <class T>
ReduceFn for_integers(ReduceOp op) {
    return op == ReduceOp::avg ? &PairwiseTree<T, Sum>::template reduce<Divide<T>> : for_bits<T>(op);
}

template <class T>
ReduceFn for_real(ReduceOp op) {
    switch (op) {
        case ReduceOp::sum:
        case ReduceOp::premul_sum:
            return kernel<T, Sum>;
        case ReduceOp::avg:
            return average<T>;
        case ReduceOp::product:
            return kernel<T, Product>;
        case ReduceOp::min:
            return kernel<T, Min>;
        case ReduceOp::max:
            return kernel<T, Max>;
        default:
            return nullptr;
    }
}

template <class T>
ReduceFn for_complex(ReduceOp op) {
    switch (op) {
        case ReduceOp::sum:
        case ReduceOp::premul_sum:
            return kernel<T, Sum>;
        case ReduceOp::avg:
            return average<T>;
        case ReduceOp::product:
            return kernel<T, Product>;
        default:
            return nullptr;
    }
}

}  // namespace

ReduceFn find(DType dtype, ReduceOp op) {
    switch (dtype) {
        case DType::boolean:
            return op == ReduceOp::premul_sum ? nullptr : for_bits<Boolean>(op);
        case DType::u8:
            return for_integers<std::uint8_t>(op);
        case DType::i8:
            return for_integers<std::int8_t>(op);
        case DType::u16:
            return for_integers<std::uint16_t>(op);
        case DType::i16:
            return for_integers<std::int16_t>(op);
        case DType::u32:
            return for_integers<std::uint32_t>(op);
        case DType::i32:
            return for_integers<std::int32_t>(op);
        case DType::u64:
            return for_integers<std::uint64_t>(op);
        case DType::i64:
            return for_integers<std::int64_t>(op);
        case DType::f16:
            return for_real<Half>(op);
        case DType::bf16:
            return for_real<BFloat>(op);
        case DType::f32:
            return for_real<float>(op);
        case DType::f64:
            return for_real<double>(op);
        case DType::c32:
            return for_complex<Complex<Half>>(op);
        case DType::c64:
            return for_complex<Complex<float>>(op);
        case DType::c128:
            return for_complex<Complex<double>>(op);
        default:
            return nullptr;
    }
}

}  // namespace paceline::PACELINE_SIMD
