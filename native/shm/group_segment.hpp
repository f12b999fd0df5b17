// A segment that the members of a group on one host share. The first member creates it and the others map it. Each
// member initializes its part and then waits for the others; afterward the descriptors are closed.
#pragma once

#include <memory>
#include <vector>

#include "shm/host_mesh.hpp"

namespace paceline::shm {

class GroupSegment {
  public:
    // `places` lists the members' mesh ranks, in the same order on every member; `id` is unique to the group. Returns
    // nullptr if the first member does not offer the memory by `deadline`. Throws std::system_error if descriptors or
    // memory run out.
    static std::unique_ptr<GroupSegment> open(Mesh& mesh, std::vector<int> places, RegionId id, std::size_t nbytes,
                                              Mesh::Deadline deadline);
    GroupSegment(const GroupSegment&) = delete;
    GroupSegment& operator=(const GroupSegment&) = delete;
    // Cancels the segment for all members unless all of them have arrived.
    ~GroupSegment();

    // Returns the memory: page-aligned, and initially zero.
    std::uint8_t* data() const;
    // Waits until all members have called this; afterward each member's earlier writes are visible to all. Returns
    // false if a member has not called it by `deadline`, has died or left, or gives up.
    bool wait_for_all(Mesh::Deadline deadline);

  private:
    GroupSegment(Mesh& mesh, std::vector<int> places, RegionId id) : mesh_(mesh), places_(std::move(places)), id_(id) {}

    bool is_mine() const { return places_[0] == mesh_.rank(); }
    bool waits_in_vain() const;

    Mesh& mesh_;
    std::vector<int> places_;
    RegionId id_;
    std::shared_ptr<Segment> segment_;
    bool is_complete_ = false;
};

}  // namespace paceline::shm
