// The update kernels for the SIMD level "avx512".
#include <cstddef>
#include <cstdint>

#include "update/update_rule.hpp"

#define PACELINE_SIMD avx512
#include "update/kernels.inl"
