// The update kernels for the SIMD level "baseline".
#include <cstddef>
#include <cstdint>

#include "update/update_rule.hpp"

#define PACELINE_SIMD baseline
#include "update/kernels.inl"
