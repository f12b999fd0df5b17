// The packing and unpacking kernels for the SIMD level "baseline".
#include <cstddef>
#include <cstdint>

#include "wire/wire.hpp"

#define PACELINE_SIMD baseline
#include "wire/kernels.inl"
