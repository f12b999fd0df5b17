// The reduction kernels for the SIMD level "avx512".
#include <cstddef>
#include <cstdint>

#include "reduce/reduce.hpp"

#define PACELINE_SIMD avx512
#include "reduce/kernels.inl"
