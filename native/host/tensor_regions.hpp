// The shared memory of the tensors that this process created with `empty_shared`, looked up by address.
//
// A region is offered to a group's peers on first use in a call on that group, and withdrawn when its tensor is freed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "host/group.hpp"
#include "shm/host_mesh.hpp"
#include "shm/segment.hpp"

namespace paceline::host {

// Creates and registers a region of `nbytes` bytes; returns nullptr if memory runs out.
std::shared_ptr<shm::Segment> create_region(std::size_t nbytes);
// Withdraws the region from every mesh to which it was offered.
void unregister_region(const shm::Segment& segment);

// Long-lived memory that the ranks on a host map, for example for model parameters.
struct SharedRegion {
    std::shared_ptr<shm::Segment> segment;  // nullptr, with errno set, if memory or descriptors run out
    shm::RegionId id;                       // the id that the peers pass to `HostMesh::region`
};

// Creates `nbytes` bytes of zeroed memory and offers it to the ranks of `mesh` until `withdraw_region`.
SharedRegion share_region(shm::HostMesh& mesh, std::size_t nbytes);
void withdraw_region(shm::HostMesh& mesh, shm::RegionId id);

// Sets call.region and call.offset if the call's only tensor is in a region, and offers the region to the mesh.
void locate_tensor(Call& call, const std::shared_ptr<shm::HostMesh>& mesh);

// Moves the tensor of a failed call to private memory with the same contents at the same address, because peers that
// are still in the call may write to the shared memory at any later time. Also withdraws the region. Only the pages
// that contain the tensor are replaced; other threads may be writing to other tensors in the region.
void make_tensor_private(const Call& call);

}  // namespace paceline::host
