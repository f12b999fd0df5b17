// Copies a recording while its process is writing it.
#pragma once

#include <cstdint>
#include <vector>

namespace paceline::record {

// Returns a copy of the recording in the file of `fd`, in which every entry is consistent or marked as being written.
// The copy is empty if no process has begun to record there. Throws std::system_error if the file cannot be mapped. The
// file must not shrink in the meantime.
std::vector<std::uint8_t> snapshot(int fd);

}  // namespace paceline::record
