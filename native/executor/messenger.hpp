// Point-to-point messages, and what the ranks of a group report to each other beside their collectives.
//
// Note: the protocol. Every pair of ranks has one control lane, on which each side writes a sequence of frames
// (frame.hpp).
//
// - A *request* is a send or a receive of the program. It is *open* until it is done, and a receive without a
//   message is *posted*. A message without a receive is an *arrival*. A message matches the first receive, and a
//   receive the first message, with the same sender (or kAnySource) and tag; so messages with one tag keep their
//   order.
// - A message of up to kEagerBytes is *eager*: its bytes follow its frame at once, and the receiver keeps them
//   until there is a receive. The *window* bounds that memory: a sender has at most kEagerWindow of eager messages
//   for which the receiver has not returned a *credit*. The receiver credits what its receives have taken, in
//   batches of half a window. A message that finds the window full is offered instead, so a send never waits for
//   credits.
// - A longer message is an *offer*: the frame travels alone, and the receiver answers with *accept* once a receive
//   matches. Then the bytes follow as *data* frames of at most kPartBytes, straight from tensor to tensor; other
//   frames may come between them. An offer costs the receiver a frame, so kMostOffers of them to one rank are the
//   most that may wait; a further send fails as `too_many_offers`.
// - A receive of another size or dtype than its message fails as a mismatch. An offer is then answered with
//   *refuse*, and its send fails too; an eager message is dropped, its send being done long ago. The group remains
//   usable.
// - *waiting* carries the call in which the sender waits, for the reports of time-outs and mismatches.
// - *ask* and *answer* find out who holds up a call that has taken too long (inquiry.cpp).
// - A *verdict* says why the sender broke the group. A rank that receives its first verdict adopts it, fails all of
//   its requests with it, and passes it on, so that no rank sees another one leave before it knows why. A rank
//   keeps its first reason: whatever arrives later is ignored.
// - *goodbye* is the last frame of a rank that destroys its group. Its peers fail what they have open with that
//   rank and continue with the others. A lane that ends without a goodbye means that the rank died, which breaks
//   the group.
//
// A rank trusts its peers with the data only: a frame that breaks these rules counts as the peer's death.
//
// The thread that waits for a request *drives* all control lanes, one thread at a time; the messenger's own thread does
// so while asynchronous requests are open and nobody waits.
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

#include "call/recorded_call.hpp"
#include "call/wait_chain.hpp"
#include "call/waits.hpp"
#include "executor/frame.hpp"
#include "executor/memory.hpp"
#include "link/lane_set.hpp"

namespace paceline::executor {

constexpr int kAnySource = -1;
constexpr std::size_t kEagerBytes = 16 << 10;    // longer messages are offered
constexpr std::size_t kEagerWindow = 512 << 10;  // eager bytes to one rank without a credit
constexpr std::size_t kPartBytes = 1 << 20;      // the longest data frame, for which other frames may have to wait
constexpr std::size_t kMostOffers = 1 << 16;     // offers to one rank that wait for its receives

// What an eager message takes of the window. The receiver keeps a frame even for an empty message, so none is free.
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
    RecordedCall recorded_;
    Outcome outcome_;
    std::atomic<bool> done_{false};
    std::list<std::shared_ptr<Request>>::iterator place_{};  // among the open ones
};

class Messenger final : public Waits::Link {
  public:
    explicit Messenger(link::LaneSet& lanes);
    Messenger(const Messenger&) = delete;
    Messenger& operator=(const Messenger&) = delete;
    ~Messenger() override { close(); }
    // Ends open requests, says goodbye to every peer, finishes all lanes, and waits a moment until the goodbyes have
    // been delivered. Idempotent.
    void close();

    std::shared_ptr<Request> send(int peer, std::int32_t tag, DType dtype, const Stream& tensor,
                                  std::int64_t timeout_ns);
    std::shared_ptr<Request> receive(int peer, std::int32_t tag, DType dtype, const Stream& tensor,
                                     std::int64_t timeout_ns);
    // True when done; false after `timeout_ns`. `interrupted` ends the request.
    bool wait(const std::shared_ptr<Request>& request, std::int64_t timeout_ns, const Interrupted& interrupted);
    // Lets open requests go on without anybody waiting for them.
    void run_in_background();

    // Records the messages from now on as those of the group that the recorder knows by this serial.
    void record_as(std::uint32_t group) { recorded_as_.store(group, std::memory_order_relaxed); }

    // Processes pending input once; returns at once if another thread is already doing so.
    void poll();
    // Wakes `waiter` when any thread breaks the group; nullptr wakes nobody.
    void on_failure(link::Waiter* waiter);
    // Why the group is broken; nullopt while it is not.
    std::optional<Outcome> failure();
    // Breaks the group for this rank and sends the verdict to all others. The first reason is kept, and returned.
    Outcome fail(Outcome outcome);
    // Breaks the group as `aborted`, on any thread, while others wait in it.
    void abort();
    // Reports to all others that this rank waits in a call.
    void announce(const CallHeader& header);
    // The latest call that each rank has announced.
    std::vector<CallHeader> announced();
    // Record calls that were not announced: one whose header came from `peer`, and one that ends only when all have
    // made it.
    void saw(int peer, const CallHeader& header);
    void saw_all(const CallHeader& header);
    // The latest call of each rank, announced or recorded; its operation is `none` where no call is known.
    std::vector<CallHeader> latest();
    // Answers what the peers have asked, as far as this rank knows the answer yet.
    void answer();
    void serve() override;
    bool ask(int name, const Occasion& in) override;
    // The number of frames that wait to be written to `peer`.
    std::size_t queued(int peer);
    // Ranks that said goodbye.
    std::vector<int> left();
    // The outcome of a call that fails because `peer` is gone.
    Outcome without(int peer);

  private:
    struct Outgoing {
        Frame frame;
        std::vector<std::uint8_t> own;     // the body, if the messenger owns it
        std::shared_ptr<Request> request;  // otherwise its tensor holds the body
        std::size_t sent = 0;              // bytes of frame and body
    };
    struct Arrival {  // a message that has come
        Frame frame;
        int peer;
        std::vector<std::uint8_t> bytes;
    };
    struct Question {
        Occasion in;
        std::chrono::steady_clock::time_point came;
    };
    struct PeerState {
        std::deque<Outgoing> outgoing;
        std::map<std::uint64_t, std::shared_ptr<Request>> offered;   // sends, by id, until they are accepted
        std::map<std::uint64_t, std::shared_ptr<Request>> accepted;  // receives, by id, until all their data has come
        std::map<std::uint64_t, std::size_t> still;                  // of `accepted`: bytes that are still to come
        std::uint64_t next_id = 1;
        std::size_t eager_out = 0;    // charges of eager messages sent, not credited yet
        std::size_t eager_in = 0;     // charges of those taken by receives, not credited yet
        std::size_t eager_held = 0;   // charges of those that have come, not credited yet
        std::size_t offers_held = 0;  // offers that have come, without a receive
        std::uint64_t latest_id = 0;  // of the messages that have come
        // The frame that is coming in.
        Frame frame;
        std::size_t frame_read = 0;
        std::vector<std::uint8_t> body;
        std::size_t body_read = 0;
        std::shared_ptr<Request> body_for;
        CallHeader announced{};
        std::vector<Question> questions;  // of it, without an answer
        bool deaf = false;                // its lane takes no more, but may hold frames to read
        bool left = false;
        bool lost = false;
        Cause cause;  // why it left, if it said so
    };

    std::vector<CallHeader> latest_locked();
    PeerState& state(int peer) { return states_[static_cast<std::size_t>(peer)]; }

    bool progress();
    bool flush(int peer);
    bool receive_from(int peer);
    bool begin_body(int peer);
    void end_body(int peer);
    bool is_next(int peer);
    static bool belongs(const Frame& frame, int peer, const Request& request);
    std::list<std::shared_ptr<Request>>::iterator posted_for(const Frame& frame, int peer);
    void arrive(Arrival arrival);
    void take(Arrival& arrival, const std::shared_ptr<Request>& request);
    void accept(int peer, const Frame& offer, const std::shared_ptr<Request>& request);
    void credit(int peer, std::size_t nbytes);
    static bool fits(const Frame& frame, const Request& request);
    void misfit(const Frame& frame, int peer, const std::shared_ptr<Request>& request);
    void open(const std::shared_ptr<Request>& request, std::int64_t timeout_ns);
    void push(int peer, Frame frame, std::vector<std::uint8_t> own, std::shared_ptr<Request> request);
    void finish(const std::shared_ptr<Request>& request, Outcome outcome);
    void record_end(Request& request);
    static void copy_body(Outgoing& outgoing);
    Outcome without_locked(int peer);
    void note(const Outcome& outcome);
    void closed(int peer);
    void await_delivery(std::unique_lock<std::mutex>& hold);
    void break_group(Outcome outcome, bool notifies_others);
    void heed_abort();
    void take_question(int peer, const Occasion& in);
    void answer_locked();
    std::vector<int> peers_of(const Request& request) const;
    Wait wait_for(const Request& request) const;
    void expire(std::unique_lock<std::mutex>& hold);
    std::shared_ptr<Request> expired();
    std::optional<Outcome> time_out(std::unique_lock<std::mutex>& hold, const std::shared_ptr<Request>& request);
    void look_for_silence();
    void look_around(std::unique_lock<std::mutex>& hold, const std::shared_ptr<Request>& until, int turn,
                     const Interrupted& interrupted);
    void drive(std::unique_lock<std::mutex>& hold, const std::shared_ptr<Request>& until,
               std::chrono::steady_clock::time_point deadline, const Interrupted& interrupted);
    void background();

    link::LaneSet& lanes_;
    link::Waiter waiter_;
    link::Waiter* told_ = nullptr;  // told of a failure
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<PeerState> states_;
    std::mutex seeing_;  // guards the two below; `mutex_` may be held for long, while large messages move
    std::vector<CallHeader> seen_;
    CallHeader seen_of_all_{};
    std::list<std::shared_ptr<Request>> posted_;  // receives without a message, in the order of their calls
    std::list<Arrival> arrivals_;                 // messages without a receive, in the order of their arrival
    std::list<std::shared_ptr<Request>> open_;    // requests that are not done
    std::atomic<std::uint32_t> recorded_as_{0};
    std::optional<WaitChainSearch> search_;  // into the time-out of `search_about_`
    std::shared_ptr<Request> search_about_;
    bool inquiring_ = false;  // a thread is in the search, without `mutex_`
    bool driving_ = false;
    int urgent_ = 0;  // threads that wait for a request while another drives
    bool closing_ = false;
    std::optional<Outcome> failure_;
    std::atomic<bool> failed_{false};
    std::atomic<bool> abort_asked_{false};
    std::thread thread_;
};

}  // namespace paceline::executor
