// Words of shared memory that the kernel marks as soon as the process that holds them begins to die.
//
// The kernel closes the sockets of a dying process only after it has freed its memory, which takes a second for 4 GiB.
// Before that it walks the list of robust futexes of each of its threads (man 2 get_robust_list), marks every futex as
// orphaned and wakes one waiter of each. So a thread of every rank holds one such futex for each peer (one waiter is
// woken, so peers cannot share one), and a thread of each peer waits for the futexes of all other ranks. That needs
// futex_waitv: before Linux 5.16 only the sockets report a death.
#pragma once

#include <linux/futex.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "shm/segment.hpp"

namespace paceline::shm {

// One futex, as the kernel and the peer see it.
struct alignas(16) Held {
    std::atomic<std::uint32_t> holder{0};  // the thread that holds it, until the kernel marks it with FUTEX_OWNER_DIED
    std::atomic<std::uint32_t> note{0};    // for the peer when that happens: a packed Cause, or 0
};

class Pulse {
  public:
    // For `ranks` peers; nullptr when memory or descriptors are short.
    static std::unique_ptr<Pulse> create(int ranks);
    Pulse(const Pulse&) = delete;
    Pulse& operator=(const Pulse&) = delete;

    Segment& segment() const { return *segment_; }
    // Makes the calling thread the holder. It must live as long as the process, and hold no robust mutexes: this
    // replaces its list of them. False where the kernel does not support that.
    bool hold();
    // Writes `note` for all peers to read when the pulse ends; from any thread.
    void set_note(std::uint32_t note);
    // Called by the same thread, which may end after that without being reported.
    void release();

  private:
    // The kernel finds a futex at one fixed distance (`futex_offset`) from its list entry, for the whole list. So the
    // entries, in private memory, are exactly as far apart as the futexes in the segment.
    struct alignas(sizeof(Held)) Entry {
        robust_list list;
    };

    explicit Pulse(std::shared_ptr<Segment> segment, int ranks)
        : segment_(std::move(segment)), entries_(static_cast<std::size_t>(ranks)) {}

    std::shared_ptr<Segment> segment_;
    std::vector<Entry> entries_;
    robust_list_head head_{};
};

// Waits for the end of the peers' pulses, on a thread of its own.
class Watch {
  public:
    // `ended` is called on that thread, once a peer, with its note.
    explicit Watch(std::function<void(int peer, std::uint32_t note)> ended) : ended_(std::move(ended)) {}
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;
    ~Watch();

    // Whether this kernel can wait for many words at once.
    static bool is_possible();
    // From now on also for `peer`, whose pulse is in `segment`; this rank's is word `place`. Starts the thread.
    void add(int peer, std::shared_ptr<Segment> segment, int place);
    // Idempotent.
    void close();

  private:
    struct Watched {
        std::shared_ptr<Segment> segment;
        const Held* word;
    };

    void run();

    std::function<void(int, std::uint32_t)> ended_;
    std::mutex mutex_;
    std::map<int, Watched> watched_;
    std::atomic<std::uint32_t> changed_{0};  // of the two around it
    std::atomic<bool> closing_{false};
    std::thread thread_;
};

}  // namespace paceline::shm
