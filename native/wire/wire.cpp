#include "wire/wire.hpp"

namespace paceline {

namespace baseline {
const WireKernels* find_wire(WireType wire, DType dtype);
}
#if PACELINE_AVX
namespace avx2 {
const WireKernels* find_wire(WireType wire, DType dtype);
}
namespace avx512 {
const WireKernels* find_wire(WireType wire, DType dtype);
}
#endif

const WireKernels* find_wire_kernels(WireType wire, DType dtype, SimdLevel level) {
    if (!has_simd(level)) return nullptr;
    switch (level) {
#if PACELINE_AVX
        case SimdLevel::avx2:
            return avx2::find_wire(wire, dtype);
        case SimdLevel::avx512:
            return avx512::find_wire(wire, dtype);
#endif
        default:
            return baseline::find_wire(wire, dtype);
    }
}

}  // namespace paceline
