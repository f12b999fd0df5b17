// The update kernels for the SIMD level "baseline".
#include <cstddef>
#include <cstdint>

#include "update/rule.hpp"

#define PACELINE_SIMD baseline
#include "update/kernels.inl"
