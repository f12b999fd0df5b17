// The facilities that the ranks of one host share outside of groups: their directory (host_directory.hpp), the
// doorbells with which they wake each other, and the memory regions that they offer each other.
//
// A rank keeps a few sockets open, regardless of the number of ranks. One of them listens: a rank that needs a region
// of this rank connects, presents the directory's key, and receives the region's descriptor, or the answer that the
// region does not exist yet. The doorbell receives datagrams, each of which wakes the threads that sleep on it. Both
// sockets have random abstract names, which are in the directory. Processes of other users are rejected.
//
// A process that gives up because another rank has died or left records this in the directory at once. It may then exit
// itself, and the ranks that wait for it have the reason.
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
#include "call/waits.hpp"
#include "process/fork_guard.hpp"
#include "shm/change_notifier.hpp"
#include "shm/death_watch.hpp"
#include "shm/host_directory.hpp"
#include "shm/region_exchange.hpp"
#include "shm/segment.hpp"

namespace paceline::shm {

// A region of another rank, or the errno of a failure to map it: no descriptors or memory are left. It is neither if
// the region did not arrive in time, or its owner has died or left or has given it up.
struct Found {
    std::shared_ptr<Segment> segment;
    int shortage = 0;
};

class Mesh {
  public:
    using Deadline = std::chrono::steady_clock::time_point;

    // `names[p]` is the name that all groups of this process use for rank p of the directory; it is p if `names` is
    // empty. Throws std::system_error if the system has no descriptors left.
    Mesh(int rank, std::shared_ptr<HostDirectory> directory, std::vector<int> names = {});
    Mesh(const Mesh&) = delete;
    Mesh& operator=(const Mesh&) = delete;
    ~Mesh();

    int rank() const { return rank_; }
    int size() const { return directory_->size(); }
    const HostDirectory& directory() const { return *directory_; }
    // Returns whether the rank has died. This is an acquire: everything that the rank published is visible afterwards.
    bool has_died(int rank) const { return state_of(rank) == State::lost; }
    bool has_left(int rank) const { return state_of(rank) == State::left; }
    bool is_gone(int rank) const { return shm::is_gone(state_of(rank)); }
    // Reports every change in which ranks have died or left; each change also rings the doorbell.
    ChangeNotifier& changes() { return changes_; }
    int name(int rank) const { return names_[static_cast<std::size_t>(rank)]; }

    // The waits of this process's threads.
    Waits& waits() { return waits_; }

    // Reports to the other ranks that this process gives up because of `cause`; a later cause replaces an earlier one.
    void blame(const Cause& cause);
    // Returns that cause. A program may continue after a time-out, so such a cause expires.
    Cause blamed() const;
    // Returns the cause for which a rank gave up, if it has reported one. It is set before the rank ends.
    Cause blamed_by(int rank) const;

    // Offers `segment` to the other ranks. No earlier region of this rank may have used `id`.
    void offer(RegionId id, std::shared_ptr<Segment> segment);
    // Ends the offer, makes the ranks that keep the region drop it, and returns the region.
    std::shared_ptr<Segment> withdraw(RegionId id);
    // Ends the offer of a region, or rules out a future one, so that ranks that request the region stop waiting.
    void give_up(RegionId id);
    // Waits until `deadline` for the region that `owner` offers as `id`.
    Found fetch(int owner, RegionId id, Deadline deadline) { return get(Request::Kind::fetch, owner, id, deadline); }
    // Does the same, and keeps the region for later calls until its owner withdraws it.
    Found region(int owner, RegionId id, Deadline deadline);

    // Returns the socket on which threads that wait for shared memory are woken; see `Waiter::watch_doorbell`.
    int doorbell() const { return exchange_ ? exchange_->doorbell() : -1; }
    void wake_peer(int peer) const { exchange_->ring(directory_->entry(peer).doorbell); }

    // Leaves the mesh and reports this to the other ranks. Idempotent.
    void close();

  private:
    struct Offer {
        std::shared_ptr<Segment> segment;
        std::set<int> keepers;  // the ranks that keep the region
    };

    State state_of(int rank) const { return directory_->entry(rank).state.load(std::memory_order_acquire); }
    void serve(std::promise<void> begun);
    void answer(const Request& request, int connection);
    void announce_offers();
    Found get(Request::Kind kind, int owner, RegionId id, Deadline deadline);
    void ranks_are_gone();

    int rank_;
    std::shared_ptr<HostDirectory> directory_;
    std::vector<int> names_;
    Waits waits_;
    std::atomic<Deadline::rep> blamed_at_{0};
    const std::uint32_t forks_ = forks_from_members();  // when the mesh was created
    ChangeNotifier changes_;
    std::mutex mutex_;
    std::map<RegionId, Offer> offers_;
    std::set<RegionId> given_up_;
    std::map<std::pair<int, RegionId>, std::shared_ptr<Segment>> kept_;
    bool closed_ = false;
    std::unique_ptr<RegionExchange> exchange_;  // nullptr if there is no other rank
    ForkGuard guard_;
    std::thread server_;
    std::unique_ptr<DeathWatch> watch_;
};

}  // namespace paceline::shm
