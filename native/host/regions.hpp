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

// Memory that ranks of a host map for longer than a call, such as the parameters of a model.
struct SharedMemory {
    std::shared_ptr<shm::Segment> segment;  // nullptr, with errno set, when memory or descriptors run out
    shm::RegionId id;                       // with which the peers find it in `Mesh::region`
};

// Creates memory of `nbytes` zeros and offers it to the ranks of `mesh`, until `end_sharing`.
SharedMemory share(shm::Mesh& mesh, std::size_t nbytes);
void end_sharing(shm::Mesh& mesh, shm::RegionId id);

// Sets call.region and call.offset if the call's only tensor lies in a region, and offers the region to the mesh.
void locate(Call& call, const std::shared_ptr<shm::Mesh>& mesh);

// Gives the tensor of a call that has failed memory that no other rank has, with the same contents and at the same
// address: peers that are still in that call, or are stopped in it, may write to the shared memory at any later time.
// Nothing in the region is offered any more. Only the pages of the tensor move, so that other tensors of the region,
// which other threads may be writing to, stay where they are but for the ends of their pages.
void isolate(const Call& call);

}  // namespace paceline::host
