// The shared memory of the tensors that this process created with `empty_shared`, looked up by address.
//
// A region is offered to a group's peers when a call of the group first uses it, and withdrawn when its tensor is
// freed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "host/group.hpp"
#include "shm/mesh.hpp"
#include "shm/segment.hpp"

namespace paceline::host {

// Creates and registers a region of `nbytes` bytes; returns nullptr if memory runs out.
std::shared_ptr<shm::Segment> create_region(std::size_t nbytes);
// Withdraws the region from every mesh to which it was offered.
void forget_region(const shm::Segment& segment);

// Memory that the ranks of a host map for longer than a call, such as the parameters of a model.
struct SharedMemory {
    std::shared_ptr<shm::Segment> segment;  // nullptr, with errno set, if memory or descriptors run out
    shm::RegionId id;                       // with which the peers find it in `Mesh::region`
};

// Creates `nbytes` bytes of zeroed memory and offers it to the ranks of `mesh` until `end_sharing`.
SharedMemory share(shm::Mesh& mesh, std::size_t nbytes);
void end_sharing(shm::Mesh& mesh, shm::RegionId id);

// Sets call.region and call.offset if the call's only tensor is in a region, and offers the region to the mesh.
void locate(Call& call, const std::shared_ptr<shm::Mesh>& mesh);

// Moves the tensor of a failed call to private memory with the same contents at the same address: peers that are still
// in the call, or stopped in it, may write to the shared memory at any later time. The region is no longer offered.
// Only the pages of the tensor are moved, so that other tensors of the region, to which other threads may be writing,
// stay in place except where they share such a page.
void isolate(const Call& call);

}  // namespace paceline::host
