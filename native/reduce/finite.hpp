// Detects NaN and infinity in arrays as fast as memory can be read.
#pragma once

#include <cstddef>

#include "reduce/reduce.hpp"

namespace paceline {

// Returns true if all numbers in the array are finite. Always returns true for types that gradients cannot have.
bool are_finite(const void* data, std::size_t nbytes, DType dtype);

}  // namespace paceline
