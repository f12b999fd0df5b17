// Records, for all groups, the ranks that this process's threads are waiting for, and answers queries about these
// waits.
//
// After its first wait iteration, a thread creates an entry that records what it is waiting for, and updates the entry
// in each iteration. When a call times out, a search (wait_chain.hpp) queries the awaited ranks, then the ranks that
// those ranks are waiting for, and so on. A query may arrive over the lanes of any group that the two ranks share, so
// waiting threads periodically read the lanes of all groups (`serve`) and answer for the whole process. A rank without
// waiting threads does not answer.
//
// Lock order: `transports_mutex_`, then the lock of a transport (which transports acquire only with try_lock), then
// `mutex_`.
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

// A rank that another rank is waiting for. `global_rank` identifies the rank in all groups of a process.
struct AwaitedRank {
    std::int32_t global_rank;
    std::uint32_t reserved = 0;
    CallId call;
};

// A rank's answer to a query about why it has not finished its part of a call or message. waiting: the rank itself is
// waiting for other ranks. not_waiting: the rank's program is not waiting in any call, so no other rank blocks it.
// completed: the rank has finished its part and is in a later call.
struct Answer {
    enum class Kind : std::int32_t { waiting, not_waiting, completed };

    Kind kind = Kind::not_waiting;
    std::vector<AwaitedRank> awaited;
};

// The wait of one thread. `by_program` is false if only the thread for asynchronous calls is waiting.
struct Wait {
    CallId call;
    bool by_program = true;
    std::vector<int> global_ranks;
};

class WaitRegistry {
  public:
    using Clock = std::chrono::steady_clock;

    // The time for which a thread waits in its call before it also serves other groups.
    static constexpr std::chrono::milliseconds kServeDelay{200};

    // The lanes of one group. Neither function blocks on a lock.
    class QueryTransport {
      public:
        virtual ~QueryTransport() = default;
        // Reads and answers the queries that have arrived.
        virtual void serve() = 0;
        // Sends a query to a rank; returns false if this transport does not reach the rank or is currently unusable.
        virtual bool send_query(int global_rank, const CallId& call) = 0;
    };

    // Keeps one thread's wait registered from the first call to `update` until this object is destroyed.
    class Entry {
      public:
        Entry() = default;
        Entry(const Entry&) = delete;
        Entry& operator=(const Entry&) = delete;
        ~Entry() {
            if (registry_ != nullptr) end();
        }
        void update(WaitRegistry& registry, Wait wait);

      private:
        void end();

        WaitRegistry* registry_ = nullptr;
        std::list<Wait>::iterator position_{};
    };

    explicit WaitRegistry(int global_rank) : global_rank_(global_rank) {}
    WaitRegistry(const WaitRegistry&) = delete;
    WaitRegistry& operator=(const WaitRegistry&) = delete;

    // The global rank of this process.
    int global_rank() const { return global_rank_; }

    void add(QueryTransport& transport);
    // Removes a transport; once this returns, no thread uses it.
    void remove(QueryTransport& transport);

    // Serves all transports unless they were served very recently or another thread is serving them.
    void serve();
    // Sends a query to a rank over any transport; returns false if none reaches the rank.
    bool send_query(int global_rank, const CallId& call);
    // Returns this rank's answer to a query about `call`.
    Answer answer_for(const CallId& call) const;
    // Passes another rank's answer to the searches in progress.
    void receive_answer(int global_rank, const CallId& call, Answer answer);

  private:
    friend class WaitChainSearch;

    Answer answer_for_locked(const CallId& call) const;

    const int global_rank_;
    std::mutex transports_mutex_;
    std::vector<QueryTransport*> transports_;
    std::atomic<Clock::duration::rep> serves_again_{0};
    mutable std::mutex mutex_;
    std::list<Wait> waiting_;
    std::vector<WaitChainSearch*> searches_;
};

}  // namespace paceline
