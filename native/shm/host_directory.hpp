// The memory that all ranks of a host share, regardless of their groups: which ranks are present and how to reach them.
//
// One rank creates it and the others receive its descriptor over authenticated connections, so every process that maps
// it has proved the job's secret. It holds a key with which the ranks authenticate each other later.
//
// Each rank has an entry, which it fills before it becomes `present`. An entry's state only increases, and only after
// everything that the rank published before; a rank that reads `left` or `lost` sees these publications too. A rank
// marks itself as left, and any rank that detects the end of its pulse marks it as lost.
//
// The pulse: the kernel closes the sockets of a dying process only after it has freed its memory, which takes a second
// for 4 GiB. Before that it walks the list of robust futexes of each of its threads (man 2 get_robust_list), marks
// every futex as orphaned and wakes one waiter of each. A thread of every rank therefore holds the futexes of its
// entry, one for each of the kMostWatchers ranks before it, which is the most that a thread can wait for at once. Each
// of these ranks reports the end to all others.
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

constexpr int kMostWatchers = 120;  // futex_waitv waits for at most 128 words
constexpr std::size_t kNameBytes = 36;

enum class State : std::uint32_t { absent, present, left, lost };

constexpr bool is_gone(State state) {
    return state == State::left || state == State::lost;
}

// One futex, shared by the kernel and its watcher.
struct alignas(16) Held {
    std::atomic<std::uint32_t> holder{0};  // the thread that holds it, until the kernel marks it with FUTEX_OWNER_DIED
};

struct alignas(2048) RankEntry {
    std::atomic<State> state{State::absent};
    std::atomic<std::uint32_t> blamed{0};     // a packed `Cause`: the reason why the rank gave up or is about to
    std::atomic<std::uint32_t> offers{0};     // the number of regions offered by the rank, for ranks that wait for one
    std::array<char, kNameBytes> listener{};  // the abstract names of its sockets
    std::array<char, kNameBytes> doorbell{};
    alignas(128) Held pulse[kMostWatchers];  // entry d - 1 is for the d-th rank before this one, in a circle
};
static_assert(sizeof(RankEntry) == 2048);

class HostDirectory {
  public:
    using Key = std::array<std::uint8_t, 32>;

    // Returns nullptr, with errno set, if memory or descriptors run out.
    static std::shared_ptr<HostDirectory> create(int ranks);
    // Takes ownership of `fd`; returns nullptr if it is not the directory of `ranks` ranks.
    static std::shared_ptr<HostDirectory> adopt(int fd, int ranks);

    int size() const { return ranks_; }
    const Key& key() const { return head().key; }
    RankEntry& entry(int rank) const;
    // Returns the descriptor to pass to the other ranks, or -1 once it is closed.
    int descriptor() const { return segment_->fd(); }
    void close_descriptor() const { segment_->close_descriptor(); }

    // Incremented when a rank has died or left, and once when all ranks are present.
    std::atomic<std::uint32_t>& changes() const { return head().changes; }
    void notify() const;
    void arrive(int rank) const;
    void leave(int rank) const;
    // Marks a rank whose pulse has ended as lost unless it has left; returns false if the rank was already marked.
    bool mark_lost(int rank) const;
    // Waits until all ranks are present, for at most `timeout`; returns the ranks that are not.
    std::vector<int> absent(std::chrono::milliseconds timeout) const;

  private:
    struct Head {
        std::uint32_t ranks;
        std::atomic<std::uint32_t> arrived;
        Key key;
        alignas(128) std::atomic<std::uint32_t> changes;
    };

    HostDirectory(std::shared_ptr<Segment> segment, int ranks) : segment_(std::move(segment)), ranks_(ranks) {}
    Head& head() const;

    std::shared_ptr<Segment> segment_;
    int ranks_;
};

// The futexes of a rank's entry, held by a thread.
class Pulse {
  public:
    Pulse(const HostDirectory& directory, int rank);
    Pulse(const Pulse&) = delete;
    Pulse& operator=(const Pulse&) = delete;

    // Makes the calling thread the holder. The thread must live as long as the process and must not hold robust
    // mutexes, since this replaces its list of them. If the kernel does not support robust futexes, the futexes stay 0.
    void hold();
    // Must be called by the same thread, whose end is not reported afterwards.
    void release();

  private:
    // The kernel finds each futex at the same distance (`futex_offset`) from its list entry. The list entries, which
    // are in private memory, are therefore exactly as far apart as the futexes.
    struct alignas(sizeof(Held)) Entry {
        robust_list list;
    };

    Held* words_;
    std::vector<Entry> entries_;
    robust_list_head head_{};
};

}  // namespace paceline::shm
