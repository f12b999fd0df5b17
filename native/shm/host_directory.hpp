// Memory shared by all ranks on a host, regardless of their groups. It records which ranks are present and how to reach
// them.
//
// One rank creates the memory. The others receive its descriptor over authenticated connections, so every process that
// maps it has proved that it has the job's secret. The memory contains a key with which the ranks authenticate each
// other later.
//
// Each rank fills its entry before it sets the state to `present`. An entry's state only increases; the stores are
// releases, so a rank that reads `left` or `lost` also sees all data that the other rank published earlier. A rank
// marks itself as `left`. Any rank that finds the futexes of another rank orphaned marks that rank as `lost`.
//
// With robust futexes, the death of a process is detected quickly. The kernel closes the sockets of a dying process
// only after freeing its memory, which takes a second for 4 GiB. Before that, it walks each thread's list of robust
// futexes (man 2 get_robust_list), marks every futex as orphaned and wakes one waiter per futex. One thread on every
// rank therefore holds the futexes in the rank's entry, one for each of the kMaxWatchers preceding ranks. kMaxWatchers
// is close to the number of futexes that a thread can wait on. Each of the preceding ranks reports the death to all
// others.
#pragma once

#include <linux/futex.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "shm/rank_set.hpp"
#include "shm/segment.hpp"

namespace paceline::shm {

constexpr int kMaxWatchers = 120;  // futex_waitv accepts at most 128 words
constexpr std::size_t kNameBytes = 36;

enum class RankState : std::uint32_t { absent, present, left, lost };

constexpr bool is_gone(RankState state) {
    return state == RankState::left || state == RankState::lost;
}

// A robust futex that one watcher waits on.
struct alignas(16) RobustFutex {
    std::atomic<std::uint32_t> holder{0};  // the thread that holds it, until the kernel marks it with FUTEX_OWNER_DIED
};

struct alignas(2048) RankEntry {
    std::atomic<RankState> state{RankState::absent};
    // A packed `FailureCause`: why the rank has failed its calls or will soon fail them.
    std::atomic<std::uint32_t> reported_cause{0};
    std::atomic<std::uint32_t> offers{0};  // number of regions that the rank has offered; other ranks wait on this word
    std::array<char, kNameBytes> listener{};  // the abstract name of the rank's listening socket
    std::array<char, kNameBytes> doorbell{};
    alignas(128) RobustFutex futexes[kMaxWatchers];  // futexes[d - 1] is for the d-th preceding rank in cyclic order
};
static_assert(sizeof(RankEntry) == 2048);

class HostDirectory {
  public:
    using Key = std::array<std::uint8_t, 32>;

    // Returns nullptr, with errno set, if memory or descriptors run out.
    static std::shared_ptr<HostDirectory> create(int ranks);
    // Takes ownership of `fd`; returns nullptr if the file is not a directory for `ranks` ranks.
    static std::shared_ptr<HostDirectory> adopt(int fd, int ranks);

    int size() const { return ranks_; }
    const Key& key() const { return head().key; }
    RankEntry& entry(int rank) const;
    // Returns the descriptor to send to other ranks, or -1 after `close_descriptor`.
    int descriptor() const { return segment_->fd(); }
    void close_descriptor() const { segment_->close_descriptor(); }

    // Returns a counter that is incremented whenever a rank dies or leaves, and once when all ranks are present.
    std::atomic<std::uint32_t>& changes() const { return head().changes; }
    void notify() const;
    void arrive(int rank) const;
    void leave(int rank) const;
    // Marks a rank as lost unless it has left; returns false if it was already marked as lost or left.
    bool mark_lost(int rank) const;
    // Waits for at most `timeout` until all ranks are present; returns the absent ranks.
    std::vector<int> absent(std::chrono::milliseconds timeout) const;

  private:
    struct Header {
        std::uint32_t ranks;
        std::atomic<std::uint32_t> arrived;
        Key key;
        alignas(128) std::atomic<std::uint32_t> changes;
    };

    HostDirectory(std::shared_ptr<Segment> segment, int ranks) : segment_(std::move(segment)), ranks_(ranks) {}
    Header& head() const;

    std::shared_ptr<Segment> segment_;
    int ranks_;
};

// Holds the futexes in a rank's entry.
class RobustFutexes {
  public:
    RobustFutexes(const HostDirectory& directory, int rank);
    RobustFutexes(const RobustFutexes&) = delete;
    RobustFutexes& operator=(const RobustFutexes&) = delete;

    // Makes the calling thread the holder of the futexes. The thread must run until the process exits and must not hold
    // robust mutexes, because its robust list is replaced. If the kernel does not support robust futexes, the futexes
    // stay 0.
    void acquire();
    // Releases the futexes; the thread's exit is then not reported as a death. Must be called by the holder.
    void release();

  private:
    // The kernel locates each futex at a fixed distance (`futex_offset`) from its list entry. The list entries, which
    // are in private memory, must therefore have the same spacing as the futexes.
    struct alignas(sizeof(RobustFutex)) Entry {
        robust_list list;
    };

    RobustFutex* words_;
    std::vector<Entry> entries_;
    robust_list_head head_{};
};

}  // namespace paceline::shm
