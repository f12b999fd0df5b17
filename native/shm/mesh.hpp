// The ranks of one host, joined pairwise by authenticated Unix sockets.
//
// The sockets carry descriptors (of shared memory, each rank's doorbell and its pulse), a goodbye, and by their closing
// the news that a rank died. One thread a process listens to them, and wakes whoever waits for that rank. Bits of
// `lost` and `left` are only ever set, in that order after everything the peer published before; a reader that sees a
// bit sees those publications too. (The pulse stops when the kernel has told all of the process's threads to end.)
//
// A process that gives up because another rank has gone tells the mesh at once: then it may go itself, and those that
// miss it know why.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
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

// Who of the mesh is no longer there.
struct Liveness {
    std::atomic<std::uint64_t> lost{0};  // closed without a goodbye: died
    std::atomic<std::uint64_t> left{0};  // said goodbye
};

using RegionId = std::uint64_t;

class Mesh {
  public:
    // `sockets[p]` is the authenticated connection to rank p (-1 at `rank`); taken over and closed by the mesh.
    // `names[p]` is what all groups of this process call rank p of the mesh; p if there are none.
    // Throws std::system_error when the system has no descriptors left.
    Mesh(int rank, std::vector<int> sockets, std::vector<int> names = {});
    Mesh(const Mesh&) = delete;
    Mesh& operator=(const Mesh&) = delete;
    ~Mesh();

    int rank() const { return rank_; }
    int size() const { return static_cast<int>(sockets_.size()); }
    const Liveness& liveness() const { return liveness_; }
    // Of every change of `liveness`; the doorbell is rung for it as well.
    News& news() { return news_; }
    int name(int rank) const { return names_[static_cast<std::size_t>(rank)]; }

    // This process gives up because of `cause`; the latest counts.
    void blame(const Cause& cause);
    Cause blamed() const { return Cause::unpack(blamed_.load(std::memory_order_acquire)); }
    // What `peer` gave up for, as far as it is known here; known before its bit in `lost` or `left` is seen.
    Cause blamed_by(int peer) const {
        return Cause::unpack(blamed_by_[static_cast<std::size_t>(peer)].load(std::memory_order_acquire));
    }

    // Hands `segment` to the peers whose bits are set, under an id that no earlier region of this rank had.
    void offer(RegionId id, const Segment& segment, std::uint64_t peers);
    // Tells the peers to forget it.
    void withdraw(RegionId id, std::uint64_t peers);

    // The region that `peer` offered as `id`; waits for it until `deadline`, nullptr when it did not come, could not be
    // taken (see `shortage`), or the peer went.
    std::shared_ptr<Segment> region(int peer, RegionId id, std::chrono::steady_clock::time_point deadline);

    // Why that region could not be taken, as an errno: descriptors or memory were short. 0 if it was, or did not come.
    int shortage(int peer, RegionId id);

    // An eventfd that peers write to when this process should look at what they share; watched edge-triggered, never
    // read.
    int doorbell() const { return doorbell_; }
    void ring(int peer);

    // Says goodbye to every peer and closes the sockets. Idempotent.
    void close();

  private:
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
    std::vector<std::atomic<int>> doorbells_;  // of the peers, -1 until it came
    Liveness liveness_;
    News news_;
    std::atomic<std::uint32_t> blamed_{0};  // a packed cause, as are those of the peers
    std::vector<std::atomic<std::uint32_t>> blamed_by_;
    std::mutex mutex_;
    std::condition_variable arrived_;
    std::map<std::pair<int, RegionId>, std::shared_ptr<Segment>> regions_;
    std::map<std::pair<int, RegionId>, int> shortages_;
    std::mutex sending_;
    bool closed_ = false;
    std::unique_ptr<Pulse> pulse_;
    std::atomic<Pulse*> shown_{nullptr};  // that pulse, once the peers are to see it
    Watch watch_;
    std::thread listener_;
    ForkGuard guard_;
};

}  // namespace paceline::shm
