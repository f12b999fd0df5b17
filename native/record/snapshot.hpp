// Copies a recording while another process is writing it.
#pragma once

#include <cstdint>
#include <vector>

namespace paceline::record {

// Returns a copy of the recording in the file `fd`. Every entry in the copy is consistent or marked as being written.
// The copy is empty if no process has started recording to the file. The file must not shrink during the copy. Throws
// std::system_error if the file cannot be mapped.
std::vector<std::uint8_t> snapshot(int fd);

}  // namespace paceline::record
