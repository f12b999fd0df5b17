// The packing and unpacking kernels for the SIMD level "avx512".
#include <cstddef>
#include <cstdint>

#include "wire/wire.hpp"

#define PACELINE_SIMD avx512
#include "wire/kernels.inl"
