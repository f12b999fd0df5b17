// Records, for all groups, the ranks that this process's threads are waiting for, and answers queries about these
// waits.
//
// After its first wait iteration, a thread records what it waits for in an entry, and updates the entry in each
// iteration. When a call times out, a search (wait_chain.hpp) queries the awaited ranks, then the ranks that those are
// waiting for, and so on. A query may arrive over the lanes of any group that the two ranks share, so waiting threads
// periodically read the lanes of all groups (`serve`) and answer for the whole process. A rank without waiting threads
// does not answer.
//
// Lock order: `linking_`, then the lock of a link (which links acquire only with try_lock), then `mutex_`.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <list>
#include <mutex>
#include <vector>

namespace paceline {

class WaitChainSearch;

// A group's call or, if `sequence` is 0, a point-to-point message in the group.
struct CallId {
    std::uint64_t group = 0;
    std::uint64_t sequence = 0;

    auto operator<=>(const CallId&) const = default;
};

// Returns the id of the group that uses rings with this id; see _LINKS in comm/engine/native/engine.py.
constexpr std::uint64_t group_of(std::uint64_t id) {
    return id & ~(std::uint64_t{1} << 63);
}

// A rank that another rank is waiting for. `name` identifies the rank in all groups of a process.
struct Awaited {
    std::int32_t name;
    std::uint32_t reserved = 0;
    CallId in;
};

// A rank's answer to the question of why it has not finished its part of a call or message. waits: the rank itself is
// waiting for other ranks. elsewhere: no call of the rank's program is waiting, so no other rank holds it up. past: the
// rank has finished its part and is in a later call.
struct Answer {
    enum class Kind : std::int32_t { waits, elsewhere, past };

    Kind kind = Kind::elsewhere;
    std::vector<Awaited> awaited;
};

// The wait of one thread. `by_program` is false if only the thread for asynchronous calls is waiting.
struct Wait {
    CallId in;
    bool by_program = true;
    std::vector<int> names;
};

class Waits {
  public:
    using Clock = std::chrono::steady_clock;

    // The time for which a thread waits in its call before it also serves other groups.
    static constexpr std::chrono::milliseconds kServesAfter{200};

    // The lanes of one group. Neither of the functions blocks on a lock.
    class Link {
      public:
        virtual ~Link() = default;
        // Reads and answers the queries that have arrived.
        virtual void serve() = 0;
        // Sends a query to a rank; returns false if this link does not reach the rank or cannot be used at the moment.
        virtual bool ask(int name, const CallId& in) = 0;
    };

    // Registers the wait of one thread from the first call of `say` until destruction.
    class Entry {
      public:
        Entry() = default;
        Entry(const Entry&) = delete;
        Entry& operator=(const Entry&) = delete;
        ~Entry() {
            if (waits_ != nullptr) end();
        }
        void say(Waits& waits, Wait wait);

      private:
        void end();

        Waits* waits_ = nullptr;
        std::list<Wait>::iterator place_{};
    };

    explicit Waits(int name) : name_(name) {}
    Waits(const Waits&) = delete;
    Waits& operator=(const Waits&) = delete;

    // The name of this rank.
    int name() const { return name_; }

    void add(Link& link);
    // Removes a link; once this returns, no thread uses the link.
    void remove(Link& link);

    // Serves all links, unless they were served very recently or another thread is serving them.
    void serve();
    // Sends a query to a rank over any link; returns false if no link reaches the rank.
    bool ask(int name, const CallId& in);
    // Returns this rank's answer to a query about `in`.
    Answer about(const CallId& in) const;
    // Passes another rank's answer to the searches in progress.
    void heard(int name, const CallId& in, Answer answer);

  private:
    friend class WaitChainSearch;

    Answer about_locked(const CallId& in) const;

    const int name_;
    std::mutex linking_;
    std::vector<Link*> links_;
    std::atomic<Clock::duration::rep> serves_again_{0};
    mutable std::mutex mutex_;
    std::list<Wait> waiting_;
    std::vector<WaitChainSearch*> searches_;
};

}  // namespace paceline
