// The reduction kernels for the SIMD level "avx2".
#include <cstddef>
#include <cstdint>

#include "reduce/reduce.hpp"

#define PACELINE_SIMD avx2
#include "reduce/kernels.inl"
