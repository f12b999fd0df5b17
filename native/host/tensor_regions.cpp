#include "host/tensor_regions.hpp"

#include <algorithm>
#include <map>
#include <mutex>
#include <vector>

namespace paceline::host {
namespace {

constexpr shm::RegionId kTensorRegion = shm::RegionId{1} << 63;  // distinguishes tensors' ids from groups' ids

struct Region {
    shm::RegionId id;
    std::shared_ptr<shm::Segment> segment;
    std::vector<std::weak_ptr<shm::HostMesh>> offered_to;
    bool is_partly_private = false;  // whether any part of the region has been made private
};

struct Registry {
    std::mutex mutex;
    shm::RegionId next = kTensorRegion + 1;
    std::map<const std::uint8_t*, Region> by_address;
};

Registry& registry() {
    static auto* const the = new Registry;  // never destroyed: tensors may outlive static objects
    return *the;
}

// Returns the region that contains the entire tensor, or nullptr. The caller holds the mutex.
Region* region_around(Registry& all, const ByteRange& tensor) {
    auto found = all.by_address.upper_bound(tensor.data);
    if (found == all.by_address.begin()) return nullptr;
    Region& region = (--found)->second;
    const auto offset = static_cast<std::size_t>(tensor.data - region.segment->data());
    if (offset >= region.segment->size() || tensor.nbytes > region.segment->size() - offset) return nullptr;
    return &region;
}

}  // namespace

std::shared_ptr<shm::Segment> create_region(std::size_t nbytes) {
    auto segment = shm::Segment::create(nbytes);
    if (!segment) return nullptr;
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    all.by_address.emplace(segment->data(), Region{all.next++, segment, {}});
    return segment;
}

void unregister_region(const shm::Segment& segment) {
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    const auto found = all.by_address.find(segment.data());
    if (found == all.by_address.end()) return;
    for (const std::weak_ptr<shm::HostMesh>& each : found->second.offered_to)
        if (const auto mesh = each.lock()) mesh->withdraw(found->second.id);
    all.by_address.erase(found);
}

SharedRegion share_region(shm::HostMesh& mesh, std::size_t nbytes) {
    auto segment = shm::Segment::create(nbytes);
    if (!segment) return {nullptr, 0};
    Registry& all = registry();
    shm::RegionId id = 0;
    {
        const std::lock_guard lock(all.mutex);
        id = all.next++;
    }
    mesh.offer(id, segment);
    return {std::move(segment), id};
}

void withdraw_region(shm::HostMesh& mesh, shm::RegionId id) {
    if (const auto segment = mesh.withdraw(id)) segment->close_descriptor();  // no process can receive it anymore
}

void locate_tensor(Call& call, const std::shared_ptr<shm::HostMesh>& mesh) {
    if (call.outputs[0].ranges().size() != 1) return;
    const ByteRange& tensor = call.outputs[0].ranges()[0];
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    Region* const found = region_around(all, tensor);
    if (found == nullptr || found->is_partly_private) return;
    Region& region = *found;

    const auto is_this = [&](const std::weak_ptr<shm::HostMesh>& each) { return each.lock() == mesh; };
    if (std::none_of(region.offered_to.begin(), region.offered_to.end(), is_this)) {
        mesh->offer(region.id, region.segment);
        region.offered_to.emplace_back(mesh);
    }
    call.region = region.id;
    call.offset = static_cast<std::size_t>(tensor.data - region.segment->data());
}

void make_tensor_private(const Call& call) {
    const ByteRange& tensor = call.outputs[0].ranges()[0];
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    Region* const region = region_around(all, tensor);
    if (region == nullptr) return;
    region->is_partly_private = true;
    region->segment->make_private(call.offset, tensor.nbytes);
}

}  // namespace paceline::host
