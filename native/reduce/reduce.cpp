#include "reduce/reduce.hpp"

#include "reduce/simd.hpp"

namespace paceline {

namespace baseline {
ReduceFn find(DType dtype, ReduceOp op);
}
#if PACELINE_AVX
namespace avx2 {
ReduceFn find(DType dtype, ReduceOp op);
}
namespace avx512 {
ReduceFn find(DType dtype, ReduceOp op);
}
#endif

namespace {

using Find = ReduceFn (*)(DType, ReduceOp);

Find choose_kernels() {
#if PACELINE_AVX
    if (best_simd() == SimdLevel::avx512) return avx512::find;
    if (best_simd() == SimdLevel::avx2) return avx2::find;
#endif
    return baseline::find;
}

}  // namespace

std::size_t item_size(DType dtype) {
    switch (dtype) {
        case DType::boolean:
        case DType::u8:
        case DType::i8:
        case DType::f8_e4m3fn:
        case DType::f8_e5m2:
        case DType::f8_e4m3fnuz:
        case DType::f8_e5m2fnuz:
        case DType::f8_e8m0fnu:
            return 1;
        case DType::u16:
        case DType::i16:
        case DType::f16:
        case DType::bf16:
            return 2;
        case DType::u32:
        case DType::i32:
        case DType::f32:
        case DType::c32:
            return 4;
        case DType::u64:
        case DType::i64:
        case DType::f64:
        case DType::c64:
            return 8;
        case DType::c128:
            return 16;
    }
    return 0;
}

ReduceFn find_reduction(DType dtype, ReduceOp op) {
    static const Find find = choose_kernels();
    return find(dtype, op);
}

}  // namespace paceline
