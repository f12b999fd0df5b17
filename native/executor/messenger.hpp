// Point-to-point messages, and what the ranks of a group tell each other beside their collectives.
//
// Messages match by sender and tag in the order in which they were sent. Small ones travel with their announcement, up
// to a window that the receiver renews; large ones wait until a receive accepts them, then go in parts between which
// other frames get through. So what a rank holds for receives that were not made yet is bounded; a send of one offer
// too many ends as `unfit`.
//
// Whoever waits drives the lanes, one thread at a time; a thread of the messenger's own does while asynchronous
// requests are open and nobody waits.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "executor/frame.hpp"
#include "executor/memory.hpp"
#include "link/lane_set.hpp"

namespace paceline::executor {

constexpr int kAnySource = -1;
constexpr std::size_t kEagerBytes = 16 << 10;    // larger messages ask first
constexpr std::size_t kEagerWindow = 512 << 10;  // of small ones that were not credited yet
constexpr std::size_t kMostOffers = 1 << 16;     // messages to one rank that wait for its receives

// What a small message takes of the window: empty ones are not free for who keeps them.
constexpr std::size_t charge(std::size_t nbytes) {
    return nbytes + sizeof(Frame);
}

class Request {
  public:
    bool done() const { return done_.load(std::memory_order_acquire); }
    // Only when done.
    const Outcome& outcome() const { return outcome_; }
    int source() const { return source_; }

  private:
    friend class Messenger;

    bool receiving_ = false;
    int peer_ = kAnySource;
    std::int32_t tag_ = 0;
    DType dtype_ = DType::u8;
    Memory memory_;
    std::chrono::steady_clock::time_point started_{};
    std::chrono::steady_clock::time_point deadline_{};
    int source_ = -1;
    Outcome outcome_;
    std::atomic<bool> done_{false};
    std::list<std::shared_ptr<Request>>::iterator place_{};  // among the open ones
};

class Messenger {
  public:
    explicit Messenger(link::LaneSet& lanes);
    Messenger(const Messenger&) = delete;
    Messenger& operator=(const Messenger&) = delete;
    ~Messenger() { close(); }
    // Ends open requests, says goodbye to every peer and finishes all lanes. Idempotent.
    void close();

    std::shared_ptr<Request> send(int peer, std::int32_t tag, DType dtype, const Stream& tensor,
                                  std::int64_t timeout_ns);
    std::shared_ptr<Request> receive(int peer, std::int32_t tag, DType dtype, const Stream& tensor,
                                     std::int64_t timeout_ns);
    // True when done; false after `timeout_ns`. `interrupted` ends the request.
    bool wait(const std::shared_ptr<Request>& request, std::int64_t timeout_ns, const Interrupted& interrupted);
    // Lets open requests go on without anybody waiting for them.
    void run_in_background();

    // Looks once at what has come, unless somebody is at it.
    void poll();
    // Wakes `waiter` when the group breaks, whoever sees it; nullptr for nobody.
    void on_failure(link::Waiter* waiter);
    // Why the group is broken, once it is.
    std::optional<Outcome> failure();
    // Breaks the group for this rank and tells all others; the first reason stands, and is returned.
    Outcome fail(Outcome outcome);
    // Tells all others that this rank waits in a call.
    void announce(const CallHeader& header);
    // The latest call that each rank told of.
    std::vector<CallHeader> announced();
    // Proof of calls that nobody told of: a header that came from `peer`, and a call that ends only when all made it.
    void saw(int peer, const CallHeader& header);
    void saw_all(const CallHeader& header);
    // The latest call of each rank, told of or seen; one of no operation where none is known.
    std::vector<CallHeader> latest();
    // Frames that wait to be written to `peer`.
    std::size_t queued(int peer);
    // Ranks that said goodbye.
    std::vector<int> left();
    // How a call ends that `peer` is gone from.
    Outcome without(int peer);

  private:
    struct Outgoing {
        Frame frame;
        std::vector<std::uint8_t> own;     // bytes that follow, when they are the messenger's
        std::shared_ptr<Request> request;  // or the tensor's
        std::size_t sent = 0;              // of header and body
    };
    struct Arrival {  // nobody asked for it yet
        Frame frame;
        int peer;
        std::vector<std::uint8_t> bytes;
    };
    struct PeerState {
        std::deque<Outgoing> outgoing;
        std::map<std::uint64_t, std::shared_ptr<Request>> offered;   // sends that wait to be accepted
        std::map<std::uint64_t, std::shared_ptr<Request>> accepted;  // receives whose parts come
        std::map<std::uint64_t, std::size_t> still;                  // of `accepted`: bytes that are to come
        std::uint64_t next_id = 1;
        std::size_t eager_out = 0;    // not credited yet
        std::size_t eager_in = 0;     // taken, not credited yet
        std::size_t eager_held = 0;   // come, not credited yet
        std::size_t offers_held = 0;  // come, without a receive
        std::uint64_t latest_id = 0;  // of what came
        // The frame that is coming in.
        Frame frame;
        std::size_t frame_read = 0;
        std::vector<std::uint8_t> body;
        std::size_t body_read = 0;
        std::shared_ptr<Request> body_for;
        CallHeader announced{};
        bool deaf = false;  // takes nothing more, but what it sent may not be read yet
        bool left = false;
        bool lost = false;
        Cause cause;  // why it left
    };

    std::vector<CallHeader> latest_locked();
    PeerState& state(int peer) { return states_[static_cast<std::size_t>(peer)]; }

    bool progress();
    bool flush(int peer);
    bool receive_from(int peer);
    bool begin_body(int peer);
    void end_body(int peer);
    bool is_next(int peer);
    bool match_posted(int peer);
    void take(Arrival& arrival, const std::shared_ptr<Request>& request);
    void accept(int peer, const Frame& offer, const std::shared_ptr<Request>& request);
    void credit(int peer, std::size_t nbytes);
    bool fits(const Frame& frame, int peer, const std::shared_ptr<Request>& request);
    void open(const std::shared_ptr<Request>& request, std::int64_t timeout_ns);
    void push(int peer, Frame frame, std::vector<std::uint8_t> own, std::shared_ptr<Request> request);
    void finish(const std::shared_ptr<Request>& request, Outcome outcome);
    static void copy_body(Outgoing& outgoing);
    Outcome without_locked(int peer);
    void note(const Outcome& outcome);
    void closed(int peer);
    void break_group(Outcome outcome, bool tell);
    void expire(bool look_for_silence);
    void look_around(std::unique_lock<std::mutex>& hold, const std::shared_ptr<Request>& until, int slice,
                     const Interrupted& interrupted);
    void drive(std::unique_lock<std::mutex>& hold, const std::shared_ptr<Request>& until,
               std::chrono::steady_clock::time_point deadline, const Interrupted& interrupted);
    void background();

    link::LaneSet& lanes_;
    link::Waiter waiter_;
    link::Waiter* told_ = nullptr;  // of a failure
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<PeerState> states_;
    std::mutex seeing_;  // of the two below; `mutex_` is held while large messages move
    std::vector<CallHeader> seen_;
    CallHeader seen_of_all_{};
    std::list<std::shared_ptr<Request>> posted_;  // receives without a message, in order
    std::list<Arrival> arrivals_;                 // messages without a receive, in order
    std::list<std::shared_ptr<Request>> open_;    // requests that are not done
    bool driving_ = false;
    int urgent_ = 0;  // threads that wait for a request while another drives
    bool closing_ = false;
    std::optional<Outcome> failure_;
    std::atomic<bool> failed_{false};
    std::thread thread_;
};

}  // namespace paceline::executor
