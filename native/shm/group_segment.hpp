// A segment that the members of a group on one host share. The first member creates it and the others map it. Each
// member initializes its part and then waits for the others; afterward the descriptors are closed.
#pragma once

#include <memory>
#include <vector>

#include "shm/host_mesh.hpp"

namespace paceline::shm {

class GroupSegment {
  public:
    // `mesh_ranks` lists the members' mesh ranks, in the same order on every member; `id` is unique to the group.
    // Returns nullptr if the first member does not offer the memory by `deadline`. Throws std::system_error if
    // descriptors or memory run out.
    static std::unique_ptr<GroupSegment> open(HostMesh& mesh, std::vector<int> mesh_ranks, RegionId id,
                                              std::size_t nbytes, HostMesh::Deadline deadline);
    GroupSegment(const GroupSegment&) = delete;
    GroupSegment& operator=(const GroupSegment&) = delete;
    // Cancels the segment for all members unless all of them have arrived.
    ~GroupSegment();

    // Returns the memory: page-aligned, and initially zero.
    std::uint8_t* data() const;
    // Waits until all members have called this; afterward each member's earlier writes are visible to all. Returns
    // false if a member has not called it by `deadline`, has died or left, or cancels the segment.
    bool wait_for_all(HostMesh::Deadline deadline);

  private:
    GroupSegment(HostMesh& mesh, std::vector<int> mesh_ranks, RegionId id)
        : mesh_(mesh), mesh_ranks_(std::move(mesh_ranks)), id_(id) {}

    bool is_creator() const { return mesh_ranks_[0] == mesh_.rank(); }
    bool cannot_complete() const;

    HostMesh& mesh_;
    std::vector<int> mesh_ranks_;
    RegionId id_;
    std::shared_ptr<Segment> segment_;
    bool is_complete_ = false;
};

}  // namespace paceline::shm
