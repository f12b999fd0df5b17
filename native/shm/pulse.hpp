// Words of shared memory that the kernel marks as soon as the process that holds them begins to die.
//
// A dying process closes its sockets after its memory was freed, which takes a second for 4 GiB. Before that the kernel
// goes through the list of robust futexes of each of its threads (man 2 get_robust_list), marks them and wakes one
// waiter of each. So a thread of every rank holds one such word for each peer, and a thread of every peer waits for all
// of them. Where the kernel lacks the call for that (Linux before 5.16) there is the sockets' news alone.
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

// What the kernel and the peers see of one word.
struct alignas(16) Held {
    std::atomic<std::uint32_t> holder{0};  // a thread, until the kernel marks it
    std::atomic<std::uint32_t> note{0};    // what the peer is to know when that happens
};

class Pulse {
  public:
    // For `ranks` peers; nullptr when memory or descriptors are short.
    static std::unique_ptr<Pulse> create(int ranks);
    Pulse(const Pulse&) = delete;
    Pulse& operator=(const Pulse&) = delete;

    Segment& segment() const { return *segment_; }
    // Makes the calling thread the holder, whose end is the process's: it replaces the thread's list of robust mutexes.
    // False where the kernel does not do that.
    bool hold();
    // Leaves `note` for all peers; from any thread.
    void leave(std::uint32_t note);
    // By the same thread, which may end now without a sign.
    void release();

  private:
    // As far apart as the words: the kernel knows one distance from an entry to its word.
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
    // `ended` is called on that thread, once a peer, with the note it left.
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
