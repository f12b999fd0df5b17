// The packing and unpacking kernels for the SIMD level "avx2".
#include <cstddef>
#include <cstdint>

#include "wire/wire.hpp"

#define PACELINE_SIMD avx2
#include "wire/kernels.inl"
