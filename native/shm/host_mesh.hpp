// The facilities that the ranks on a host share outside of groups: the host directory (host_directory.hpp), the
// doorbells that wake other ranks, and the memory regions offered to other ranks.
//
// The number of open sockets does not depend on the number of ranks. To map a region of this rank, another rank
// connects to its listening socket, presents the directory's key, and receives the region's descriptor or the answer
// that the region does not exist yet. Each datagram sent to the doorbell socket wakes the threads that sleep on it. The
// directory contains the random abstract names of both sockets. Connections from other users' processes are rejected.
//
// A process that fails its calls because another rank has died or left records this in the directory immediately. If it
// then exits, the ranks that wait for it can report the original cause.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "call/call.hpp"
#include "call/wait_registry.hpp"
#include "process/fork_guard.hpp"
#include "shm/change_notifier.hpp"
#include "shm/failure_detector.hpp"
#include "shm/host_directory.hpp"
#include "shm/region_exchange.hpp"
#include "shm/segment.hpp"

namespace paceline::shm {

// Another rank's region. If mapping it failed for lack of descriptors or memory, contains the errno instead. Contains
// neither if the region did not arrive in time, or if its owner died, left, or canceled the offer.
struct FetchResult {
    std::shared_ptr<Segment> segment;
    int error = 0;
};

class HostMesh {
  public:
    using Deadline = std::chrono::steady_clock::time_point;

    // `global_ranks[p]` is the global rank of mesh rank p. If `global_ranks` is empty, mesh rank p has the global rank
    // p. Throws std::system_error if the system has no descriptors left.
    HostMesh(int rank, std::shared_ptr<HostDirectory> directory, std::vector<int> global_ranks = {});
    HostMesh(const HostMesh&) = delete;
    HostMesh& operator=(const HostMesh&) = delete;
    ~HostMesh();

    int rank() const { return rank_; }
    int size() const { return directory_->size(); }
    const HostDirectory& directory() const { return *directory_; }
    // Returns true if the rank has died. An acquire load: all data that the rank published is visible afterward.
    bool has_died(int rank) const { return state_of(rank) == RankState::lost; }
    bool has_left(int rank) const { return state_of(rank) == RankState::left; }
    bool is_gone(int rank) const { return shm::is_gone(state_of(rank)); }
    // Returns the notifier for deaths and departures. Each such change also rings the doorbell.
    ChangeNotifier& changes() { return changes_; }
    int global_rank(int rank) const { return global_ranks_[static_cast<std::size_t>(rank)]; }

    // Returns the record of what this process's threads are waiting for.
    WaitRegistry& wait_registry() { return wait_registry_; }

    // Reports to the other ranks that this process's calls fail because of `cause`; a later cause replaces an earlier
    // one.
    void report_cause(const FailureCause& cause);
    // Returns the latest cause passed to `report_cause`. Timeouts expire, because a program may continue after a
    // timeout.
    FailureCause reported_cause() const;
    // Returns the cause that a rank has reported, if any. A rank sets its cause before it exits.
    FailureCause cause_reported_by(int rank) const;

    // Offers `segment` to the other ranks. `id` must not have been used for an earlier region of this rank.
    void offer(RegionId id, std::shared_ptr<Segment> segment);
    // Withdraws the offer, asks all ranks that have cached the region to drop it, and returns the region.
    std::shared_ptr<Segment> withdraw(RegionId id);
    // Cancels an existing or future offer. Ranks that wait for the region then stop waiting.
    void cancel(RegionId id);
    // Waits until `deadline` for the region that `owner` offers under the id `id`.
    FetchResult fetch(int owner, RegionId id, Deadline deadline) {
        return get(RegionRequest::Kind::fetch, owner, id, deadline);
    }
    // Like `fetch`, but caches the region for later calls until its owner withdraws it.
    FetchResult region(int owner, RegionId id, Deadline deadline);

    // Returns the socket that wakes threads waiting for changes in shared memory; see `Waiter::watch_doorbell`.
    int doorbell() const { return exchange_ ? exchange_->doorbell() : -1; }
    void wake_peer(int peer) const { exchange_->ring(directory_->entry(peer).doorbell); }

    // Leaves the mesh and reports this to the other ranks. Idempotent.
    void close();

  private:
    struct Offer {
        std::shared_ptr<Segment> segment;
        std::set<int> cached_by;  // the ranks that have cached the region
    };

    RankState state_of(int rank) const { return directory_->entry(rank).state.load(std::memory_order_acquire); }
    void serve(std::promise<void> begun);
    void answer(const RegionRequest& request, int connection);
    void announce_offers();
    FetchResult get(RegionRequest::Kind kind, int owner, RegionId id, Deadline deadline);
    void handle_departures();

    int rank_;
    std::shared_ptr<HostDirectory> directory_;
    std::vector<int> global_ranks_;
    WaitRegistry wait_registry_;
    std::atomic<Deadline::rep> cause_reported_at_{0};
    const std::uint32_t forks_ = member_fork_count();  // the value when the mesh was created
    ChangeNotifier changes_;
    std::mutex mutex_;
    std::map<RegionId, Offer> offers_;
    std::set<RegionId> canceled_;
    std::map<std::pair<int, RegionId>, std::shared_ptr<Segment>> cache_;
    bool closed_ = false;
    std::unique_ptr<RegionExchange> exchange_;  // nullptr if this is the only rank
    ForkGuard guard_;
    std::thread server_;
    std::unique_ptr<FailureDetector> failure_detector_;
};

}  // namespace paceline::shm
