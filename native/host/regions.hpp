// The shared memory that this process's tensors from `empty_shared` live in, found by address.
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

// Registers a new region of `nbytes`; nullptr when memory is short.
std::shared_ptr<shm::Segment> create_region(std::size_t nbytes);
// Withdraws it from every mesh it was offered to.
void forget_region(const shm::Segment& segment);

// Sets call.region and call.offset when its one tensor lies in a region, and sees to it that the peers have it.
void locate(Call& call, const std::shared_ptr<shm::Mesh>& mesh, std::uint64_t peers);

}  // namespace paceline::host
