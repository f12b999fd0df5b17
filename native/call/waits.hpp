// Whom the threads of this rank wait for, in all of its groups, and how ranks ask each other about that.
//
// A thread that has waited for a turn says so in an entry, which it renews in each turn. When a call has taken too
// long, a search (wait_chain.hpp) asks the ranks that it waits for, and those that they wait for in turn. A question
// may come over the lanes of any group that two ranks share: whichever thread of a rank waits reads the lanes of all
// its groups now and then (`serve`) and answers for the whole process. A rank of which no thread waits does not answer.
//
// Locks: `linking_` comes before the lock of a link, which a link only tries to take, and `mutex_` is the innermost.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <list>
#include <mutex>
#include <vector>

namespace paceline {

class WaitChainSearch;

// A call of a group, or with sequence 0 a message between two of its ranks.
struct Occasion {
    std::uint64_t group = 0;
    std::uint64_t sequence = 0;

    auto operator<=>(const Occasion&) const = default;
};

// The id of the group to which rings with this id belong; see _LINKS in comm/engine/native/engine.py.
constexpr std::uint64_t group_of(std::uint64_t id) {
    return id & ~(std::uint64_t{1} << 63);
}

// A rank that another one waits for. A name is that by which all groups of a process know the rank.
struct Awaited {
    std::int32_t name;
    std::uint32_t reserved = 0;
    Occasion in;
};

// What a rank says when it is asked why it does not do its part on an occasion.
// waits: it waits for others itself.
// elsewhere: its program does not wait in a call of any group, so nobody but itself holds it up.
// past: it has done its part and is in a later call.
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

    // How long a call waits before its thread also serves other groups.
    static constexpr std::chrono::milliseconds kServesAfter{200};

    // The lanes of a group. Both functions do what they can without waiting for a lock.
    class Link {
      public:
        virtual ~Link() = default;
        // Reads what has come, and answers.
        virtual void serve() = 0;
        // Asks a rank; false if this link does not lead there, or cannot be used now.
        virtual bool ask(int name, const Occasion& in) = 0;
    };

    // The wait of one thread, from `say` to its own end.
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

    // This rank's own.
    int name() const { return name_; }

    void add(Link& link);
    // The link is not used any more when this returns.
    void remove(Link& link);

    // Lets all links read and answer, unless they did so a moment ago or another thread does so now.
    void serve();
    // Asks a rank over any link; false if none leads there.
    bool ask(int name, const Occasion& in);
    // Says what this rank waits for.
    Answer about(const Occasion& in) const;
    // Takes the answer of another rank.
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
