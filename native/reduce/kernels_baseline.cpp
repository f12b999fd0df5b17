// The reduction kernels for the SIMD level "baseline".
#include <cstddef>
#include <cstdint>

#include "reduce/reduce.hpp"

#define PACELINE_SIMD baseline
#include "reduce/kernels.inl"
