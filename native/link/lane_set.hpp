// The lanes of one group. Each peer has one lane for control frames and messages, and several lanes for the data of
// collectives.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "link/lane.hpp"
#include "link/link_meter.hpp"
#include "link/ring_lane.hpp"
#include "link/waiter.hpp"
#include "shm/group_segment.hpp"
#include "shm/host_mesh.hpp"
#include "tls/socket.hpp"

namespace paceline::link {

struct Peer {
    std::unique_ptr<Lane> control;
    std::vector<std::unique_ptr<Lane>> bulk;
    int mesh_rank = -1;  // the peer's mesh rank if it is on this host
};

class LaneSet {
  public:
    // The ranks on one host share rings: `mesh_ranks[r]` is group rank r's mesh rank, or -1 if it is on another host.
    // `sockets[r]` lists the connections to group rank r on another host, with the control connection first; the set
    // takes ownership of all of them, even on failure. `id` is unique to the group and the same on every member.
    // `global_ranks[r]` is the global rank of group rank r. Returns nullptr if a member on this host has not shared its
    // rings by `deadline`. Throws std::system_error if descriptors or memory run out.
    static std::unique_ptr<LaneSet> create(std::shared_ptr<shm::HostMesh> mesh, std::uint64_t id, int rank,
                                           const std::vector<int>& mesh_ranks,
                                           std::vector<std::vector<tls::Socket>> sockets,
                                           std::chrono::steady_clock::time_point deadline,
                                           std::vector<int> global_ranks = {});
    LaneSet(const LaneSet&) = delete;
    LaneSet& operator=(const LaneSet&) = delete;
    ~LaneSet();

    int rank() const { return rank_; }
    int size() const { return static_cast<int>(peers_.size()); }
    // Returns the meter for the connections to other hosts.
    LinkMeter& meter() { return meter_; }
    Peer& peer(int rank) { return peers_[static_cast<std::size_t>(rank)]; }

    // See `HostMesh::report_cause`. Ranks on other hosts receive the cause only over their control lanes.
    void report_cause(const FailureCause& cause) {
        if (mesh_) mesh_->report_cause(cause);
    }
    // Returns the record of what this process's threads are waiting for.
    WaitRegistry& wait_registry() { return mesh_ ? mesh_->wait_registry() : local_wait_registry_; }
    // Returns the id of this group as used in `CallId`.
    std::uint64_t group() const { return group_; }
    FailureCause reported_cause() const { return mesh_ ? mesh_->reported_cause() : FailureCause{}; }
    FailureCause cause_reported_by(int rank) const;
    int global_rank(int rank) const;
    std::vector<int> global_ranks_of(const std::vector<int>& ranks) const;

    void watch_control(Waiter& waiter) const;
    // Watches the bulk lanes. Input on control lanes only wakes the sleeping thread (`Waiter::watch_for_alerts`).
    void watch_bulk(Waiter& waiter) const;
    // Returns the number of deaths and departures of ranks on this host that have been reported.
    std::uint32_t changes() const { return mesh_->changes().count(); }

  private:
    explicit LaneSet(std::shared_ptr<shm::HostMesh> mesh) : mesh_(std::move(mesh)) {}

    bool share_rings(std::uint64_t id, const std::vector<int>& mesh_ranks,
                     std::chrono::steady_clock::time_point deadline);

    std::shared_ptr<shm::HostMesh> mesh_;
    WaitRegistry local_wait_registry_{0};  // used if there is no mesh
    std::uint64_t group_ = 0;
    int rank_ = 0;
    std::vector<Peer> peers_;
    std::vector<int> global_ranks_;
    std::unique_ptr<shm::GroupSegment> rings_;  // nullptr if no other rank is on this host
    LinkMeter meter_;
};

}  // namespace paceline::link
