// Copies a recording while its process writes it.
#pragma once

#include <cstdint>
#include <vector>

namespace paceline::record {

// Returns a copy of the recording in the file behind `fd` in which every entry is whole, or marked as being written.
// Empty if no process has begun to record there. Throws std::system_error if the file cannot be mapped. The file must
// not shrink meanwhile.
std::vector<std::uint8_t> snapshot(int fd);

}  // namespace paceline::record
