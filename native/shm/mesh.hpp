// The ranks of one host, as far as they have to do with each other outside of a group: their directory
// (host_directory.hpp), the doorbell by which one wakes another, and the memory that one shows to another.
//
// A rank keeps a few sockets open, however many ranks there are. One listens: whoever wants a region of this rank
// connects, shows the directory's key, and gets the region's descriptor, or the answer that it does not exist yet. The
// doorbell takes datagrams, each of which wakes whoever sleeps on it. Both have random abstract names, which are on the
// directory. A process of another user is refused.
//
// A process that gives up because another rank has gone says so on the directory at once. It may then exit itself, and
// the ranks that miss it know why.
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

// A region of another rank, or the errno for which it could not be had: no descriptors or memory are left. Neither if
// it did not come in time, or its owner is gone or has given it up.
struct Found {
    std::shared_ptr<Segment> segment;
    int shortage = 0;
};

class Mesh {
  public:
    using Deadline = std::chrono::steady_clock::time_point;

    // `names[p]` is the name that all groups of this process use for rank p of the directory; it is p if `names` is
    // empty. Throws std::system_error when the system has no descriptors left.
    Mesh(int rank, std::shared_ptr<HostDirectory> directory, std::vector<int> names = {});
    Mesh(const Mesh&) = delete;
    Mesh& operator=(const Mesh&) = delete;
    ~Mesh();

    int rank() const { return rank_; }
    int size() const { return directory_->size(); }
    const HostDirectory& directory() const { return *directory_; }
    // Whether the rank is gone; an acquire, after which whatever it published is visible.
    bool has_died(int rank) const { return state_of(rank) == State::lost; }
    bool has_left(int rank) const { return state_of(rank) == State::left; }
    bool is_gone(int rank) const { return shm::is_gone(state_of(rank)); }
    // Reports every change in which ranks are gone; each change also rings the doorbell.
    ChangeNotifier& changes() { return changes_; }
    int name(int rank) const { return names_[static_cast<std::size_t>(rank)]; }

    // Whom the threads of this process wait for.
    Waits& waits() { return waits_; }

    // Tells the others that this process gives up because of `cause`; a later cause replaces an earlier one.
    void blame(const Cause& cause);
    // That cause. A program may go on after a time-out, so such a cause does not last.
    Cause blamed() const;
    // The cause for which a rank gave up, if it said so. It is set before the rank is gone.
    Cause blamed_by(int rank) const;

    // Lets the others have `segment`. No earlier region of this rank may have used `id`.
    void offer(RegionId id, std::shared_ptr<Segment> segment);
    // Ends that, and tells those that keep the region to forget it. Returns it.
    std::shared_ptr<Segment> withdraw(RegionId id);
    // Ends the offer of a region for which others may still ask, or makes sure that none comes: they wait no longer.
    void give_up(RegionId id);
    // Waits until `deadline` for the region that `owner` offers as `id`.
    Found fetch(int owner, RegionId id, Deadline deadline) { return get(Request::Kind::fetch, owner, id, deadline); }
    // The same; the region is kept for later calls until its owner withdraws it.
    Found region(int owner, RegionId id, Deadline deadline);

    // A socket on which whoever waits for shared memory is woken; see `Waiter::watch_doorbell`.
    int doorbell() const { return exchange_ ? exchange_->doorbell() : -1; }
    void wake_peer(int peer) const { exchange_->ring(directory_->entry(peer).doorbell); }

    // Says goodbye to the others. Idempotent.
    void close();

  private:
    struct Offer {
        std::shared_ptr<Segment> segment;
        std::set<int> keepers;  // ranks
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
    const std::uint32_t forks_ = forks_from_members();  // when the mesh was made
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
