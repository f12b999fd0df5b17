// The SIMD levels for which kernels are compiled, each from the same source.
#pragma once

#include <cstdint>

namespace paceline {

enum class SimdLevel : std::uint8_t { baseline, avx2, avx512 };

// Returns true if this build contains kernels for the level and this machine can run them.
bool has_simd(SimdLevel level);

// Returns the fastest level that this machine can run.
SimdLevel best_simd();

// Returns "avx512", "avx2" or "baseline".
const char* name_of(SimdLevel level);

}  // namespace paceline
