// One segment that ranks of the host share as members of a group. The first of them makes it and the others fetch it;
// each fills its own part, and then each waits for the others. After that nobody needs a descriptor any more.
#pragma once

#include <memory>
#include <vector>

#include "shm/mesh.hpp"

namespace paceline::shm {

class GroupSegment {
  public:
    // `places` are the members' ranks in the mesh, in the same order on each of them; `id` is new for each group.
    // Returns nullptr when the first member does not offer the memory until `deadline`. Throws std::system_error when
    // descriptors or memory are short.
    static std::unique_ptr<GroupSegment> open(Mesh& mesh, std::vector<int> places, RegionId id, std::size_t nbytes,
                                              Mesh::Deadline deadline);
    GroupSegment(const GroupSegment&) = delete;
    GroupSegment& operator=(const GroupSegment&) = delete;
    // Before all members have come, gives the memory up for all of them.
    ~GroupSegment();

    // The memory, of zeros at first, from a multiple of the size of a page on.
    std::uint8_t* data() const;
    // Waits until all members have come here, after which each sees what the others have written before. False when one
    // has not come by `deadline`, is gone, or gives up.
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
