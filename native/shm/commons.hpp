// One segment that ranks of the host share as members of a group. The first of them makes it and the others fetch it;
// each fills its own part, and then all meet. After that nobody needs a descriptor any more.
#pragma once

#include <memory>
#include <vector>

#include "shm/mesh.hpp"

namespace paceline::shm {

class Commons {
  public:
    // `places` are the members' ranks in the mesh, in the same order on each of them; `id` is new for each group.
    // Returns nullptr when the first member does not offer the memory until `deadline`. Throws std::system_error when
    // descriptors or memory are short.
    static std::unique_ptr<Commons> open(Mesh& mesh, std::vector<int> places, RegionId id, std::size_t nbytes,
                                         Mesh::Deadline deadline);
    Commons(const Commons&) = delete;
    Commons& operator=(const Commons&) = delete;
    // Without having met, gives the memory up, and then nobody meets there.
    ~Commons();

    // The memory, of zeros at first, from a multiple of the size of a page on.
    std::uint8_t* data() const;
    // Waits until all members have come here, after which each sees what the others have written before. False when one
    // has not come by `deadline`, is gone, or gives up.
    bool meet(Mesh::Deadline deadline);

  private:
    Commons(Mesh& mesh, std::vector<int> places, RegionId id) : mesh_(mesh), places_(std::move(places)), id_(id) {}

    bool is_mine() const { return places_[0] == mesh_.rank(); }
    bool waits_in_vain() const;

    Mesh& mesh_;
    std::vector<int> places_;
    RegionId id_;
    std::shared_ptr<Segment> segment_;
    bool have_met_ = false;
};

}  // namespace paceline::shm
