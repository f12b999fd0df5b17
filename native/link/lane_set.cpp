#include "link/lane_set.hpp"

#include <bit>
#include <cerrno>
#include <new>
#include <system_error>

#include "link/encrypted_lane.hpp"

namespace paceline::link {
namespace {

constexpr int kLanesOfAPair = 2;  // rings: control and bulk

// Returns the ring of lane `lane` whose reader is at `place`; it lies in its writer's segment.
Ring& ring_at(shm::Segment& segment, int place, int lane) {
    return *std::launder(reinterpret_cast<Ring*>(segment.data()) + place * kLanesOfAPair + lane);
}

}  // namespace

std::unique_ptr<LaneSet> LaneSet::create(std::shared_ptr<shm::Mesh> mesh, std::uint64_t id, int rank,
                                         const std::vector<int>& mesh_ranks,
                                         std::vector<std::vector<tls::Socket>> sockets,
                                         std::chrono::steady_clock::time_point deadline, std::vector<int> names) {
    std::unique_ptr<LaneSet> lanes(new LaneSet(std::move(mesh)));
    lanes->names_ = std::move(names);
    lanes->id_ = id;
    lanes->rank_ = rank;
    lanes->peers_.resize(mesh_ranks.size());
    for (std::size_t r = 0; r < sockets.size(); ++r) {
        Peer& peer = lanes->peers_[r];
        std::vector<int> connections;
        for (tls::Socket& socket : sockets[r]) {
            connections.push_back(socket.descriptor);
            std::unique_ptr<Lane> lane = lane_over(std::move(socket));
            if (!peer.control)
                peer.control = std::move(lane);
            else
                peer.bulk.push_back(std::move(lane));
        }
        if (!connections.empty()) lanes->meter_.watch(lanes->name(static_cast<int>(r)), std::move(connections));
    }
    if (!lanes->share_rings(mesh_ranks, deadline)) return nullptr;
    return lanes;
}

// Every rank's segment holds the rings that it writes to, in the order in which the host's ranks appear in the group.
bool LaneSet::share_rings(const std::vector<int>& mesh_ranks, std::chrono::steady_clock::time_point deadline) {
    std::vector<int> locals;  // group ranks
    int my_place = 0;
    for (int r = 0; r < size(); ++r) {
        if (mesh_ranks[static_cast<std::size_t>(r)] < 0) continue;
        if (r == rank_) my_place = static_cast<int>(locals.size());
        locals.push_back(r);
    }
    if (locals.size() < 2) return true;
    const std::size_t rings = locals.size() * kLanesOfAPair;
    auto mine = shm::Segment::create(rings * sizeof(Ring));
    if (!mine) throw std::system_error(errno, std::generic_category(), "memfd_create");
    for (std::size_t i = 0; i < rings; ++i) new (mine->data() + i * sizeof(Ring)) Ring;
    segments_.push_back(mine);
    for (const int r : locals)
        if (r != rank_) local_peers_ |= shm::bit(mesh_ranks[static_cast<std::size_t>(r)]);
    mesh_->offer(id_, *mine, local_peers_);
    for (std::size_t place = 0; place < locals.size(); ++place) {
        const int r = locals[place];
        if (r == rank_) continue;
        Peer& peer = peers_[static_cast<std::size_t>(r)];
        peer.mesh_rank = mesh_ranks[static_cast<std::size_t>(r)];
        const auto theirs = mesh_->region(peer.mesh_rank, id_, deadline);
        if (const int why = theirs ? 0 : mesh_->shortage(peer.mesh_rank, id_))
            throw std::system_error(why, std::generic_category(), "the rings of another rank");
        if (!theirs || theirs->size() < rings * sizeof(Ring)) return false;
        segments_.push_back(theirs);
        for (int lane = 0; lane < kLanesOfAPair; ++lane) {
            const std::uint64_t mask = shm::bit(peer.mesh_rank);
            auto rings_of_pair = std::make_unique<RingLane>(
                ring_at(*mine, static_cast<int>(place), lane), ring_at(*theirs, my_place, lane),
                [mesh = mesh_.get(), to = peer.mesh_rank] { mesh->wake_peer(to); },
                [mesh = mesh_.get(), mask] {
                    const auto& liveness = mesh->liveness();
                    return ((liveness.lost.load(std::memory_order_acquire) |
                             liveness.left.load(std::memory_order_acquire)) &
                            mask) != 0;
                });
            if (lane == 0)
                peer.control = std::move(rings_of_pair);
            else
                peer.bulk.push_back(std::move(rings_of_pair));
        }
    }
    return true;
}

Cause LaneSet::blamed_by(int rank) const {
    const int there = peers_[static_cast<std::size_t>(rank)].mesh_rank;
    return mesh_ && there >= 0 ? mesh_->blamed_by(there) : Cause{};
}

int LaneSet::name(int rank) const {
    return names_.empty() ? rank : names_[static_cast<std::size_t>(rank)];
}

LaneSet::~LaneSet() {
    meter_.close();
    peers_.clear();
    if (local_peers_ != 0) mesh_->withdraw(id_, local_peers_);
}

void LaneSet::watch_control(Waiter& waiter) const {
    for (const Peer& peer : peers_)
        if (peer.control && peer.control->descriptor() >= 0) waiter.watch(peer.control->descriptor());
    if (local_peers_ != 0) waiter.watch(mesh_->doorbell());
}

void LaneSet::watch_bulk(Waiter& waiter) const {
    for (const Peer& peer : peers_)
        for (const auto& lane : peer.bulk)
            if (lane->descriptor() >= 0) waiter.watch(lane->descriptor());
    for (const Peer& peer : peers_)
        if (peer.control && peer.control->descriptor() >= 0) waiter.watch_for_alerts(peer.control->descriptor());
    if (local_peers_ != 0) waiter.watch(mesh_->doorbell());
}

}  // namespace paceline::link
