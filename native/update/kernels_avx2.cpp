// The update kernels for the SIMD level "avx2".
#include <cstddef>
#include <cstdint>

#include "update/update_rule.hpp"

#define PACELINE_SIMD avx2
#include "update/kernels.inl"
