// The ranks of one host, joined pairwise by authenticated Unix sockets.
//
// The sockets carry descriptors (of shared memory, and of each rank's doorbell and pulse) and a goodbye; a socket that
// closes without a goodbye shows that the rank died. One thread per process listens to them and wakes every thread that
// waits for that rank. Bits of `lost` and `left` are only ever set, never cleared, and only after everything that the
// peer published before; a reader that sees a bit sees those publications too. (The pulse stops when the kernel has
// told all of the process's threads to end.)
//
// A process that gives up because another rank has gone reports this to the mesh at once. It may then exit itself, and
// the ranks that miss it know why.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "call/call.hpp"
#include "process/fork_guard.hpp"
#include "shm/news.hpp"
#include "shm/pulse.hpp"
#include "shm/segment.hpp"

namespace paceline::shm {

constexpr int kMaxRanks = 64;  // a rank is one bit of a 64-bit mask

constexpr std::uint64_t bit(int rank) {
    return std::uint64_t{1} << rank;
}

// The ranks of the mesh that are gone.
struct Liveness {
    std::atomic<std::uint64_t> lost{0};  // ranks that died: their socket closed without a goodbye
    std::atomic<std::uint64_t> left{0};  // ranks that said goodbye
};

using RegionId = std::uint64_t;

class Mesh {
  public:
    // `sockets[p]` is the authenticated connection to rank p (-1 at `rank`); the mesh takes it over and closes it.
    // `names[p]` is the name that all groups of this process use for rank p of the mesh; it is p if `names` is empty.
    // Throws std::system_error when the system has no descriptors left.
    Mesh(int rank, std::vector<int> sockets, std::vector<int> names = {});
    Mesh(const Mesh&) = delete;
    Mesh& operator=(const Mesh&) = delete;
    ~Mesh();

    int rank() const { return rank_; }
    int size() const { return static_cast<int>(sockets_.size()); }
    const Liveness& liveness() const { return liveness_; }
    // Reports every change of `liveness`; each change also rings the doorbell.
    News& news() { return news_; }
    int name(int rank) const { return names_[static_cast<std::size_t>(rank)]; }

    // Tells the peers that this process gives up because of `cause`; a later cause replaces an earlier one.
    void blame(const Cause& cause);
    Cause blamed() const { return Cause::unpack(blamed_.load(std::memory_order_acquire)); }
    // The cause for which `peer` gave up, if it is known here. It is set before the peer's bit in `lost` or `left`.
    Cause blamed_by(int peer) const {
        return Cause::unpack(blamed_by_[static_cast<std::size_t>(peer)].load(std::memory_order_acquire));
    }

    // Offers `segment` to the peers whose bits are set. No earlier region of this rank may have used `id`.
    void offer(RegionId id, const Segment& segment, std::uint64_t peers);
    // Tells the peers to forget that region.
    void withdraw(RegionId id, std::uint64_t peers);

    // Waits until `deadline` for the region that `peer` offered as `id` and returns it. Returns nullptr when it did not
    // arrive, could not be accepted (see `shortage`), was withdrawn before it was asked for, or the peer is gone.
    std::shared_ptr<Segment> region(int peer, RegionId id, std::chrono::steady_clock::time_point deadline);

    // The errno for which that region could not be accepted (no descriptors or memory left); 0 if it was accepted or
    // did not arrive.
    int shortage(int peer, RegionId id);

    // An eventfd that peers write to when this process should check their shared memory. It is watched edge-triggered
    // and never read.
    int doorbell() const { return doorbell_; }
    void wake_peer(int peer);

    // Says goodbye to every peer and closes the sockets. Idempotent.
    void close();

  private:
    enum class Kind : std::uint32_t;
    struct Message;

    void listen();
    void show_pulse();
    void pulse_ended(int peer, std::uint32_t note);
    bool receive(int peer);
    void tell_of(std::atomic<std::uint64_t>& mask, int peer);
    void send(int peer, const Message& message, int fd);
    void close_sockets();

    int rank_;
    std::vector<int> sockets_;
    std::vector<int> names_;
    int wake_;
    int doorbell_;
    std::vector<std::atomic<int>> doorbells_;  // the peers' doorbells, -1 until they arrive
    Liveness liveness_;
    News news_;
    std::atomic<std::uint32_t> blamed_{0};  // a packed `Cause`, like each entry of `blamed_by_`
    std::vector<std::atomic<std::uint32_t>> blamed_by_;
    std::mutex mutex_;
    std::condition_variable arrived_;
    struct Offered {
        std::shared_ptr<Segment> segment;
        bool is_taken = false;
    };
    std::map<std::pair<int, RegionId>, Offered> regions_;
    std::set<std::pair<int, RegionId>> withdrawn_;  // those that nobody had asked for: their owner gave up
    std::map<std::pair<int, RegionId>, int> shortages_;
    std::mutex sending_;
    bool closed_ = false;
    std::unique_ptr<Pulse> pulse_;
    std::atomic<Pulse*> shown_{nullptr};  // the pulse, once the peers may see it
    Watch watch_;
    std::thread listener_;
    ForkGuard guard_;
};

}  // namespace paceline::shm
