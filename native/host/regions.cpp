#include "host/regions.hpp"

#include <map>
#include <mutex>
#include <vector>

namespace paceline::host {
namespace {

constexpr shm::RegionId kTensorRegion = shm::RegionId{1} << 63;  // keeps them distinct from the ids of groups

struct Offer {
    std::weak_ptr<shm::Mesh> mesh;
    std::uint64_t peers;
};

struct Region {
    shm::RegionId id;
    std::shared_ptr<shm::Segment> segment;
    std::vector<Offer> offers;
    bool is_isolated = false;  // or a part of it
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

// Returns the region that holds all of the tensor, nullptr without one; the caller holds the mutex.
Region* region_around(Registry& all, const Piece& tensor) {
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
    const std::lock_guard hold(all.mutex);
    all.by_address.emplace(segment->data(), Region{all.next++, segment, {}});
    return segment;
}

void forget_region(const shm::Segment& segment) {
    Registry& all = registry();
    const std::lock_guard hold(all.mutex);
    const auto found = all.by_address.find(segment.data());
    if (found == all.by_address.end()) return;
    for (const Offer& offer : found->second.offers)
        if (const auto mesh = offer.mesh.lock()) mesh->withdraw(found->second.id, offer.peers);
    all.by_address.erase(found);
}

SharedMemory share(shm::Mesh& mesh, std::uint64_t peers, std::size_t nbytes) {
    auto segment = shm::Segment::create(nbytes);
    if (!segment) return {nullptr, 0};
    Registry& all = registry();
    shm::RegionId id = 0;
    {
        const std::lock_guard hold(all.mutex);
        id = all.next++;
    }
    mesh.offer(id, *segment, peers);
    segment->close_descriptor();  // the peers have descriptors of their own
    return {std::move(segment), id};
}

void locate(Call& call, const std::shared_ptr<shm::Mesh>& mesh, std::uint64_t peers) {
    if (call.outputs[0].pieces().size() != 1) return;
    const Piece& tensor = call.outputs[0].pieces()[0];
    Registry& all = registry();
    const std::lock_guard hold(all.mutex);
    Region* const found = region_around(all, tensor);
    if (found == nullptr || found->is_isolated) return;
    Region& region = *found;

    Offer* known = nullptr;
    for (Offer& offer : region.offers)
        if (offer.mesh.lock() == mesh) known = &offer;
    if (known == nullptr) known = &region.offers.emplace_back(Offer{mesh, 0});
    if (const std::uint64_t fresh = peers & ~known->peers; fresh != 0) {
        mesh->offer(region.id, *region.segment, fresh);
        known->peers |= fresh;
    }
    call.region = region.id;
    call.offset = static_cast<std::size_t>(tensor.data - region.segment->data());
}

void isolate(const Call& call) {
    const Piece& tensor = call.outputs[0].pieces()[0];
    Registry& all = registry();
    const std::lock_guard hold(all.mutex);
    Region* const region = region_around(all, tensor);
    if (region == nullptr) return;
    region->is_isolated = true;
    region->segment->make_private(call.offset, tensor.nbytes);
}

}  // namespace paceline::host
