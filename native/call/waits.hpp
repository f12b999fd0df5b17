// The ranks for which the threads of this rank wait, in all of its groups, and the queries of other ranks about them.
//
// A thread that has waited for a turn records this in an entry, which it renews in each turn. When a call has timed
// out, a search (wait_chain.hpp) queries the ranks for which it waits, and the ranks for which these wait in turn. A
// query may arrive over the lanes of any group that two ranks share: any waiting thread of a rank reads the lanes of
// all its groups from time to time (`serve`) and answers for the whole process. A rank without waiting threads does not
// answer.
//
// Locks: `linking_` is acquired before the lock of a link, which a link only tries to acquire; `mutex_` is the
// innermost.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <list>
#include <mutex>
#include <vector>

namespace paceline {

class WaitChainSearch;

// A call of a group or, with sequence 0, a message between two of its ranks.
struct Occasion {
    std::uint64_t group = 0;
    std::uint64_t sequence = 0;

    auto operator<=>(const Occasion&) const = default;
};

// The id of the group to which rings with this id belong; see _LINKS in comm/engine/native/engine.py.
constexpr std::uint64_t group_of(std::uint64_t id) {
    return id & ~(std::uint64_t{1} << 63);
}

// A rank for which another rank waits. All groups of a process use the same name for a rank.
struct Awaited {
    std::int32_t name;
    std::uint32_t reserved = 0;
    Occasion in;
};

// A rank's answer to the query why it has not finished its part on an occasion.
// waits: it waits for other ranks itself.
// elsewhere: its program does not wait in a call of any group, so no other rank holds it up.
// past: it has finished its part and is in a later call.
struct Answer {
    enum class Kind : std::int32_t { waits, elsewhere, past };

    Kind kind = Kind::elsewhere;
    std::vector<Awaited> awaited;
};

// `by_program`: a thread of the program waits, not only one that runs its asynchronous calls.
struct Wait {
    Occasion in;
    bool by_program = true;
    std::vector<int> names;
};

class Waits {
  public:
    using Clock = std::chrono::steady_clock;

    // The time that a call waits before its thread also serves other groups.
    static constexpr std::chrono::milliseconds kServesAfter{200};

    // The lanes of a group. Neither function waits for a lock.
    class Link {
      public:
        virtual ~Link() = default;
        // Reads the queries that have arrived, and answers them.
        virtual void serve() = 0;
        // Queries a rank; returns false if this link does not lead to it or cannot be used now.
        virtual bool ask(int name, const Occasion& in) = 0;
    };

    // The wait of one thread, from `say` until the entry is destroyed.
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
    // The link is no longer used once this returns.
    void remove(Link& link);

    // Makes all links read and answer, unless they did so very recently or another thread is doing so.
    void serve();
    // Queries a rank over any link; returns false if no link leads to it.
    bool ask(int name, const Occasion& in);
    // Returns this rank's answer about an occasion.
    Answer about(const Occasion& in) const;
    // Stores the answer of another rank.
    void heard(int name, const Occasion& in, Answer answer);

  private:
    friend class WaitChainSearch;

    Answer about_locked(const Occasion& in) const;

    const int name_;
    std::mutex linking_;
    std::vector<Link*> links_;
    std::atomic<Clock::duration::rep> serves_again_{0};
    mutable std::mutex mutex_;
    std::list<Wait> waiting_;
    std::vector<WaitChainSearch*> searches_;
};

}  // namespace paceline
