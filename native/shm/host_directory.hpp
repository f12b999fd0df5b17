// The memory that all ranks of a host share, whichever groups they are in: who is there, and how to reach whom.
//
// One rank makes it and the others receive its descriptor over authenticated connections, so whoever maps it has proved
// the job's secret. It holds a key, by which the ranks recognise each other later on.
//
// Each rank has an entry, which it fills before it becomes `present`. An entry's state only ever grows, and only after
// everything that the rank published before; whoever reads `left` or `lost` sees those publications too. The rank
// itself says that it has left, and any rank that sees the end of its pulse says that it is lost.
//
// The pulse: the kernel closes the sockets of a dying process only after it has freed its memory, which takes a second
// for 4 GiB. Before that it walks the list of robust futexes of each of its threads (man 2 get_robust_list), marks
// every futex as orphaned and wakes one waiter of each. So a thread of every rank holds the futexes of its entry, one
// for each of the kMostWatchers ranks before it: more could not be waited for at once. Each of those tells all others.
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

constexpr int kMostWatchers = 120;  // futex_waitv waits for 128 words at most
constexpr std::size_t kNameBytes = 36;

enum class State : std::uint32_t { absent, present, left, lost };

constexpr bool is_gone(State state) {
    return state == State::left || state == State::lost;
}

// One futex, as the kernel and its watcher see it.
struct alignas(16) Held {
    std::atomic<std::uint32_t> holder{0};  // the thread that holds it, until the kernel marks it with FUTEX_OWNER_DIED
};

struct alignas(2048) RankEntry {
    std::atomic<State> state{State::absent};
    std::atomic<std::uint32_t> blamed{0};     // a packed `Cause`: why the rank gave up, or is about to
    std::atomic<std::uint32_t> offers{0};     // how many regions the rank has offered, for those that wait for one
    std::array<char, kNameBytes> listener{};  // the abstract names of its sockets
    std::array<char, kNameBytes> doorbell{};
    alignas(128) Held pulse[kMostWatchers];  // entry d - 1 is for the d-th rank before this one, in a circle
};
static_assert(sizeof(RankEntry) == 2048);

class HostDirectory {
  public:
    using Key = std::array<std::uint8_t, 32>;

    // Returns nullptr, with errno set, when memory or descriptors are short.
    static std::shared_ptr<HostDirectory> create(int ranks);
    // Takes over `fd`; returns nullptr if it is not the directory of so many ranks.
    static std::shared_ptr<HostDirectory> adopt(int fd, int ranks);

    int size() const { return ranks_; }
    const Key& key() const { return head().key; }
    RankEntry& entry(int rank) const;
    // The descriptor that is passed to the other ranks; -1 once it is closed.
    int descriptor() const { return segment_->fd(); }
    void close_descriptor() const { segment_->close_descriptor(); }

    // Rises when a rank is gone, and once when all have come.
    std::atomic<std::uint32_t>& changes() const { return head().changes; }
    void notify() const;
    void arrive(int rank) const;
    void leave(int rank) const;
    // Marks a rank whose pulse has ended as lost, if it had not left; false if that was known.
    bool mark_lost(int rank) const;
    // Waits until all ranks have come, at most for `timeout`; returns those that have not come.
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

    // Makes the calling thread the holder. It must live as long as the process, and hold no robust mutexes: this
    // replaces its list of them. Where the kernel does not support that, the futexes stay 0.
    void hold();
    // Called by the same thread, which may end after that without being reported.
    void release();

  private:
    // The kernel finds a futex at one fixed distance (`futex_offset`) from its list entry, for the whole list. So the
    // entries, in private memory, are exactly as far apart as the futexes in the entry.
    struct alignas(sizeof(Held)) Entry {
        robust_list list;
    };

    Held* words_;
    std::vector<Entry> entries_;
    robust_list_head head_{};
};

}  // namespace paceline::shm
