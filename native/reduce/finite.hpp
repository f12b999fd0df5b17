// Finds NaN and infinity in arrays as fast as memory can be read.
#pragma once

#include <cstddef>

#include "reduce/reduce.hpp"

namespace paceline {

// Returns whether the array has only finite numbers. Those of types that gradients do not have are taken to be finite.
bool are_finite(const void* data, std::size_t nbytes, DType dtype);

}  // namespace paceline
