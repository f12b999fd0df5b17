// Point-to-point messages, and the reports that the ranks of a group exchange in addition to their collectives.
//
// Note: the protocol. Every pair of ranks has one control lane, on which each side writes a sequence of frames
// (frame.hpp).
// - A *request* is a send or a receive of the program. It is *open* until it is done, and a receive without a
//   message is *posted*. A message without a receive is an *arrival*. A message matches the first receive, and a
//   receive matches the first message, with the same sender (or kAnySource) and tag; so messages with the same tag
//   keep their order.
// - A message of up to kEagerBytes is *eager*: its bytes follow its frame at once, and the receiver keeps them
//   until there is a receive. The *window* bounds that memory: a sender has at most kEagerWindow of eager messages
//   for which the receiver has not returned a *credit*. The receiver credits the messages that its receives have
//   consumed, in batches of half a window. A message that exceeds the window is offered instead, so a send never
//   waits for credits.
// - A longer message is an *offer*: the frame is sent alone, and the receiver answers with *accept* once a receive
//   matches. Then the bytes follow as *data* frames of at most kPartBytes, directly from tensor to tensor; other
//   frames may be sent between them. Each offer takes a frame at the receiver, so at most kMostOffers to one rank may
//   wait; a further send fails as `too_many_offers`.
// - A receive whose size or dtype differs from its message's fails as a mismatch. An offer is then answered with
//   *refuse*, and its send fails too; an eager message, whose send was done long ago, is dropped. The group remains
//   usable.
// - *waiting* carries the call in which the sender waits, for the reports of time-outs and mismatches.
// - *ask* and *answer* determine which ranks hold up a call that has timed out (inquiry.cpp).
// - A *verdict* is the reason why the sender broke the group. A rank that receives its first verdict adopts it, fails
//   all of its requests with it, and passes it on, so that no rank detects that another one leaves before it has the
//   reason. A rank keeps its first reason and ignores later ones.
// - *goodbye* is the last frame of a rank that destroys its group. Its peers fail their open requests with that rank
//   and continue with the others. A lane that ends without a goodbye means that the rank died, which breaks the
//   group.
// A rank trusts its peers only with the data: a frame that violates these rules counts as the peer's death.
// A thread that waits for a request *drives* all control lanes, one thread at a time; the messenger's own thread does
// so while asynchronous requests are open and no other thread waits.
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
constexpr std::size_t kPartBytes = 1 << 20;      // the longest data frame; other frames may have to wait for it
constexpr std::size_t kMostOffers = 1 << 16;     // the most offers to one rank that may wait for its receives

// The share of the window that an eager message takes. The receiver keeps a frame even for an empty message, so no
// message is free.
constexpr std::size_t charge(std::size_t nbytes) {
    return nbytes + sizeof(Frame);
}

class Request {
  public:
    bool done() const { return done_.load(std::memory_order_acquire); }
    // Valid only once the request is done.
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
    std::list<std::shared_ptr<Request>>::iterator place_{};  // its position among the open requests
};

class Messenger final : public Waits::Link {
  public:
    explicit Messenger(link::LaneSet& lanes);
    Messenger(const Messenger&) = delete;
    Messenger& operator=(const Messenger&) = delete;
    ~Messenger() override { close(); }
    // Ends open requests, sends a goodbye to every peer, finishes all lanes, and waits briefly until the goodbyes have
    // been delivered. Idempotent.
    void close();

    std::shared_ptr<Request> send(int peer, std::int32_t tag, DType dtype, const Stream& tensor,
                                  std::int64_t timeout_ns);
    std::shared_ptr<Request> receive(int peer, std::int32_t tag, DType dtype, const Stream& tensor,
                                     std::int64_t timeout_ns);
    // Returns true once the request is done, or false after `timeout_ns`. `interrupted` ends the request.
    bool wait(const std::shared_ptr<Request>& request, std::int64_t timeout_ns, const Interrupted& interrupted);
    // Makes open requests proceed while no thread waits for them.
    void run_in_background();

    // Records later messages under the recorder's serial number of the group.
    void record_as(std::uint32_t group) { recorded_as_.store(group, std::memory_order_relaxed); }

    // Processes pending input once; returns at once if another thread is already doing so.
    void poll();
    // Wakes `waiter`, unless it is nullptr, when any thread breaks the group.
    void on_failure(link::Waiter* waiter);
    // Returns why the group is broken, or nullopt if it is not.
    std::optional<Outcome> failure();
    // Breaks the group for this rank and sends the verdict to all others. The first reason is kept and returned.
    Outcome fail(Outcome outcome);
    // Breaks the group as `aborted`; any thread may call this while others wait in the group.
    void abort();
    // Reports to all others that this rank waits in a call.
    void announce(const CallHeader& header);
    // The latest call that each rank has announced.
    std::vector<CallHeader> announced();
    // Record calls that were not announced: a call whose header came from `peer`, and a call that completes only after
    // all ranks have made it.
    void saw(int peer, const CallHeader& header);
    void saw_all(const CallHeader& header);
    // Returns the latest call of each rank, announced or recorded; its operation is `none` if no call is known.
    std::vector<CallHeader> latest();
    // Answers the peers' queries, as far as this rank already has the answers.
    void answer();
    void serve() override;
    bool ask(int name, const Occasion& in) override;
    // The number of frames that wait to be written to `peer`.
    std::size_t queued(int peer);
    // The ranks that have sent a goodbye.
    std::vector<int> left();
    // Returns the outcome of a call that fails because `peer` died or left.
    Outcome without(int peer);

  private:
    struct Outgoing {
        Frame frame;
        std::vector<std::uint8_t> own;     // the body, if the messenger owns it
        std::shared_ptr<Request> request;  // otherwise its tensor holds the body
        std::size_t sent = 0;              // bytes of frame and body
    };
    struct Arrival {  // a message that has arrived
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
        std::map<std::uint64_t, std::shared_ptr<Request>> accepted;  // receives, by id, until they are complete
        std::map<std::uint64_t, std::size_t> still;                  // the bytes of `accepted` that are still missing
        std::uint64_t next_id = 1;
        std::size_t eager_out = 0;    // charges of eager messages sent, not credited yet
        std::size_t eager_in = 0;     // charges of eager messages consumed by receives, not credited yet
        std::size_t eager_held = 0;   // charges of eager messages that have arrived, not credited yet
        std::size_t offers_held = 0;  // offers that have arrived and have no receive
        std::uint64_t latest_id = 0;  // the latest id of an arrived message
        // The frame that is being received.
        Frame frame;
        std::size_t frame_read = 0;
        std::vector<std::uint8_t> body;
        std::size_t body_read = 0;
        std::shared_ptr<Request> body_for;
        CallHeader announced{};
        std::vector<Question> questions;  // its queries without an answer
        bool deaf = false;                // its lane accepts no more frames, but may have frames to read
        bool left = false;
        bool lost = false;
        Cause cause;  // the reason why it left, if it reported one
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
    link::Waiter* told_ = nullptr;  // woken on a failure
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<PeerState> states_;
    std::mutex seeing_;  // guards the two below, since `mutex_` may be held for long while large messages move
    std::vector<CallHeader> seen_;
    CallHeader seen_of_all_{};
    std::list<std::shared_ptr<Request>> posted_;  // receives without a message, in the order of their calls
    std::list<Arrival> arrivals_;                 // messages without a receive, in the order of their arrival
    std::list<std::shared_ptr<Request>> open_;    // requests that are not done
    std::atomic<std::uint32_t> recorded_as_{0};
    std::optional<WaitChainSearch> search_;  // the search about the time-out of `search_about_`
    std::shared_ptr<Request> search_about_;
    bool inquiring_ = false;  // a thread is in the search and does not hold `mutex_`
    bool driving_ = false;
    int urgent_ = 0;  // threads that wait for a request while another drives
    bool closing_ = false;
    std::optional<Outcome> failure_;
    std::atomic<bool> failed_{false};
    std::atomic<bool> abort_asked_{false};
    std::thread thread_;
};

}  // namespace paceline::executor
