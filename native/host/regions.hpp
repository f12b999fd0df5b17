// The shared memory of the tensors that this process made with `empty_shared`, looked up by address.
//
// A region is offered to a group's peers when a call first uses it there, and withdrawn when its tensor is freed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "host/group.hpp"
#include "shm/mesh.hpp"
#include "shm/segment.hpp"

namespace paceline::host {

// Creates and registers a region of `nbytes`; returns nullptr when memory runs out.
std::shared_ptr<shm::Segment> create_region(std::size_t nbytes);
// Withdraws the region from every mesh to which it was offered.
void forget_region(const shm::Segment& segment);

// Sets call.region and call.offset if the call's only tensor lies in a region, and offers the region to the peers.
void locate(Call& call, const std::shared_ptr<shm::Mesh>& mesh, std::uint64_t peers);

}  // namespace paceline::host
