// Detects NaN and infinity in arrays as fast as memory can be read.
#pragma once

#include <cstddef>

#include "reduce/reduce.hpp"

namespace paceline {

// Returns whether the array has only finite numbers. Numbers of types that gradients do not have count as finite.
bool are_finite(const void* data, std::size_t nbytes, DType dtype);

}  // namespace paceline
