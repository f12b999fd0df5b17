#include "reduce/reduce.hpp"

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

struct Level {
    const char* name;
    ReduceFn (*find)(DType, ReduceOp);
};

Level choose_level() {
#if PACELINE_AVX
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        return {"avx512", avx512::find};
    if (__builtin_cpu_supports("avx2")) return {"avx2", avx2::find};
#endif
    return {"baseline", baseline::find};
}

const Level& level() {
    static const Level chosen = choose_level();
    return chosen;
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
    return level().find(dtype, op);
}

const char* simd_level() {
    return level().name;
}

}  // namespace paceline
