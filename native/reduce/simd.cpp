#include "reduce/simd.hpp"

namespace paceline {

bool has_simd(SimdLevel level) {
    switch (level) {
        case SimdLevel::baseline:
            return true;
#if PACELINE_AVX
        case SimdLevel::avx2:
            return __builtin_cpu_supports("avx2");
        case SimdLevel::avx512:
            return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#endif
        default:
            return false;
    }
}

SimdLevel best_simd() {
    static const SimdLevel best = has_simd(SimdLevel::avx512) ? SimdLevel::avx512
                                  : has_simd(SimdLevel::avx2) ? SimdLevel::avx2
                                                              : SimdLevel::baseline;
    return best;
}

const char* name_of(SimdLevel level) {
    switch (level) {
        case SimdLevel::baseline:
            return "baseline";
        case SimdLevel::avx2:
            return "avx2";
        case SimdLevel::avx512:
            return "avx512";
    }
    return "";
}

}  // namespace paceline
