#include "link/lane_set.hpp"

#include <new>

#include "link/encrypted_lane.hpp"

namespace paceline::link {
namespace {

constexpr std::size_t kLanesOfAPair = 2;  // rings: control and bulk
constexpr std::size_t kMaxRingBytes = 256 << 10;
constexpr std::size_t kMinRingBytes = 4 << 10;
constexpr std::size_t kAllRingsBytes = std::size_t{2} << 30;  // limit per group; most of this memory is never touched

// The rings between the ranks on one host. The counters of all rings are followed by the bytes of all rings; rings with
// the same reader are adjacent.
class Rings {
  public:
    explicit Rings(std::size_t ranks) : ranks_(ranks) {
        while (ring_bytes_ > kMinRingBytes && ring_bytes_ * count() > kAllRingsBytes) ring_bytes_ /= 2;
    }

    std::size_t nbytes() const { return count() * ring_bytes_ + marks_nbytes(); }

    Ring at(std::uint8_t* memory, std::size_t writer, std::size_t reader, std::size_t lane) const {
        const std::size_t number = (reader * kLanesOfAPair + lane) * ranks_ + writer;
        return {std::launder(reinterpret_cast<RingCounters*>(memory)) + number,
                memory + marks_nbytes() + number * ring_bytes_, ring_bytes_};
    }

  private:
    static constexpr std::size_t kPage = 4096;

    std::size_t count() const { return ranks_ * ranks_ * kLanesOfAPair; }
    std::size_t marks_nbytes() const { return (count() * sizeof(RingCounters) + kPage - 1) / kPage * kPage; }

    std::size_t ranks_;
    std::size_t ring_bytes_ = kMaxRingBytes;
};

}  // namespace

std::unique_ptr<LaneSet> LaneSet::create(std::shared_ptr<shm::HostMesh> mesh, std::uint64_t id, int rank,
                                         const std::vector<int>& mesh_ranks,
                                         std::vector<std::vector<tls::Socket>> sockets,
                                         std::chrono::steady_clock::time_point deadline,
                                         std::vector<int> global_ranks) {
    std::unique_ptr<LaneSet> lanes(new LaneSet(std::move(mesh)));
    lanes->global_ranks_ = std::move(global_ranks);
    lanes->group_ = group_of(id);
    lanes->rank_ = rank;
    lanes->peers_.resize(mesh_ranks.size());
    for (std::size_t r = 0; r < sockets.size(); ++r) {
        Peer& peer = lanes->peers_[r];
        std::vector<int> connections;
        for (tls::Socket& socket : sockets[r]) {
            connections.push_back(socket.descriptor);
            std::unique_ptr<Lane> lane = make_lane(std::move(socket));
            if (!peer.control)
                peer.control = std::move(lane);
            else
                peer.bulk.push_back(std::move(lane));
        }
        if (!connections.empty()) lanes->meter_.watch(lanes->global_rank(static_cast<int>(r)), std::move(connections));
    }
    if (!lanes->share_rings(id, mesh_ranks, deadline)) return nullptr;
    return lanes;
}

bool LaneSet::share_rings(std::uint64_t id, const std::vector<int>& mesh_ranks,
                          std::chrono::steady_clock::time_point deadline) {
    std::vector<int> places;  // the mesh ranks of the members on this host
    std::vector<int> locals;  // the group ranks of the members on this host
    std::size_t mine = 0;
    for (int r = 0; r < size(); ++r) {
        const int place = mesh_ranks[static_cast<std::size_t>(r)];
        if (place < 0) continue;
        if (r == rank_) mine = locals.size();
        places.push_back(place);
        locals.push_back(r);
    }
    if (locals.size() < 2) return true;
    const Rings rings(locals.size());
    rings_ = shm::GroupSegment::open(*mesh_, places, id, rings.nbytes(), deadline);
    if (!rings_) return false;
    for (std::size_t at = 0; at < locals.size(); ++at) {
        if (at == mine) continue;
        Peer& peer = peers_[static_cast<std::size_t>(locals[at])];
        peer.mesh_rank = places[at];
        for (std::size_t lane = 0; lane < kLanesOfAPair; ++lane) {
            const Ring outgoing = rings.at(rings_->data(), mine, at, lane);
            const Ring incoming = rings.at(rings_->data(), at, mine, lane);
            new (incoming.counters) RingCounters;
            auto rings_of_pair = std::make_unique<RingLane>(
                outgoing, incoming, [mesh = mesh_.get(), to = peer.mesh_rank] { mesh->wake_peer(to); },
                [mesh = mesh_.get(), to = peer.mesh_rank] { return mesh->is_gone(to); });
            if (lane == 0)
                peer.control = std::move(rings_of_pair);
            else
                peer.bulk.push_back(std::move(rings_of_pair));
        }
    }
    return rings_->wait_for_all(deadline);
}

FailureCause LaneSet::cause_reported_by(int rank) const {
    const int there = peers_[static_cast<std::size_t>(rank)].mesh_rank;
    return mesh_ && there >= 0 ? mesh_->cause_reported_by(there) : FailureCause{};
}

int LaneSet::global_rank(int rank) const {
    return global_ranks_.empty() ? rank : global_ranks_[static_cast<std::size_t>(rank)];
}

std::vector<int> LaneSet::global_ranks_of(const std::vector<int>& ranks) const {
    std::vector<int> global_ranks;
    for (const int rank : ranks) global_ranks.push_back(global_rank(rank));
    return global_ranks;
}

LaneSet::~LaneSet() {
    meter_.close();
    peers_.clear();
}

void LaneSet::watch_control(Waiter& waiter) const {
    for (const Peer& peer : peers_)
        if (peer.control && peer.control->descriptor() >= 0) waiter.watch(peer.control->descriptor());
    if (rings_) waiter.watch_doorbell(mesh_->doorbell());
}

void LaneSet::watch_bulk(Waiter& waiter) const {
    for (const Peer& peer : peers_)
        for (const auto& lane : peer.bulk)
            if (lane->descriptor() >= 0) waiter.watch(lane->descriptor());
    for (const Peer& peer : peers_)
        if (peer.control && peer.control->descriptor() >= 0) waiter.watch_for_alerts(peer.control->descriptor());
    if (rings_) waiter.watch_doorbell(mesh_->doorbell());
}

}  // namespace paceline::link
