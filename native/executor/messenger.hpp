// Point-to-point messages, and the control messages that accompany a group's collectives.
//
// Note: the protocol. Every pair of ranks has one control lane, on which each side writes a sequence of frames
// (frame.hpp).
// - A *request* is a send or a receive by the program. A request is *open* until it is done. A receive without a
//   matching message is *posted*; a message without a matching receive is *unexpected*. A message matches the first
//   posted receive with the same sender (or kAnySource) and tag; a receive matches the first such unexpected message.
//   Messages with the same tag therefore keep their order.
// - A message of up to kEagerBytes is *eager*: its bytes follow its frame immediately, and the receiver stores them
//   until a receive matches. The *window* limits that memory: a sender may have at most kEagerWindow bytes of eager
//   messages without a *credit* from the receiver. The receiver sends credits for consumed messages in batches of half
//   a window. A message that would exceed the window is offered instead, so a send never waits for credits.
// - A longer message is an *offer*: the frame is sent alone, and the receiver answers with *accept* once a receive
//   matches. Then the bytes follow as *data* frames of at most kPartBytes, directly from tensor to tensor; other frames
//   may be sent between them. Each offer occupies a frame at the receiver, so at most kMaxOffers to one rank may be
//   pending; a further send fails as `too_many_offers`.
// - A receive whose size or dtype differs from that of its message fails as a mismatch. The receiver answers an offer
//   with *refuse*, and the send also fails. An eager message is dropped, because its send has already completed. The
//   group remains usable.
// - *waiting* contains the call in which the sender is waiting; error messages for timeouts and mismatches use it.
// - *query* and *answer* determine which ranks block a call that has timed out (wait_queries.cpp).
// - A *failure* is the reason why the sender broke the group. A rank adopts the first failure report that it receives,
//   fails all of its requests with it, and forwards it to all ranks, because each of them must have the reason before
//   it detects that another rank has left. Later failure reports are ignored.
// - *goodbye* is the last frame from a rank that destroys its group. Its peers fail their open requests to and from
//   that rank; all other requests continue. If a lane is closed without a goodbye, its rank has died, and the group is
//   broken. Peers are not trusted to follow this protocol: a frame that violates these rules counts as the peer's
//   death.
//
// A thread that waits for a request *drives* all control lanes; only one thread does so at a time. The messenger's own
// thread drives them while asynchronous requests are open and no other thread waits.
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
#include "call/wait_registry.hpp"
#include "executor/frame.hpp"
#include "executor/tensor_bytes.hpp"
#include "link/lane_set.hpp"

namespace paceline::executor {

constexpr int kAnySource = -1;
constexpr std::size_t kEagerBytes = 16 << 10;    // longer messages are offered
constexpr std::size_t kEagerWindow = 512 << 10;  // eager bytes to one rank without a credit
constexpr std::size_t kPartBytes = 1 << 20;      // maximum data per frame, which bounds the delay of other frames
constexpr std::size_t kMaxOffers = 1 << 16;      // maximum number of offers that await receives on one rank

// Returns the part of the window that an eager message uses. Even an empty message counts, because the receiver stores
// its frame.
constexpr std::size_t charge(std::size_t nbytes) {
    return nbytes + sizeof(Frame);
}

class Request {
  public:
    bool done() const { return done_.load(std::memory_order_acquire); }
    // Valid only after the request is done.
    const Outcome& outcome() const { return outcome_; }
    int source() const { return source_; }

  private:
    friend class Messenger;

    bool receiving_ = false;
    int peer_ = kAnySource;
    std::int32_t tag_ = 0;
    DType dtype_ = DType::u8;
    TensorBytes tensor_;
    std::chrono::steady_clock::time_point started_{};
    std::chrono::steady_clock::time_point deadline_{};
    int source_ = -1;
    RecordedCall recorded_;
    Outcome outcome_;
    std::atomic<bool> done_{false};
    std::list<std::shared_ptr<Request>>::iterator place_{};  // the position in the messenger's list of open requests
};

class Messenger final : public WaitRegistry::QueryTransport {
  public:
    explicit Messenger(link::LaneSet& lanes);
    Messenger(const Messenger&) = delete;
    Messenger& operator=(const Messenger&) = delete;
    ~Messenger() override { close(); }
    // Completes all pending requests with an error, sends a goodbye to every peer, shuts down all lanes, and waits
    // briefly for the goodbyes to be delivered. Idempotent.
    void close();

    std::shared_ptr<Request> send(int peer, std::int32_t tag, DType dtype, const ByteStream& tensor,
                                  std::int64_t timeout_ns);
    std::shared_ptr<Request> receive(int peer, std::int32_t tag, DType dtype, const ByteStream& tensor,
                                     std::int64_t timeout_ns);
    // Waits for a request. Returns true once it is done, or false after `timeout_ns`. Fails the request if
    // `interrupted` returns true.
    bool wait(const std::shared_ptr<Request>& request, std::int64_t timeout_ns, const Interrupted& interrupted);
    // Starts the background thread, which drives open requests while no other thread is waiting.
    void run_in_background();

    // Sets the group's serial number in the recording for all later messages.
    void record_as(std::uint32_t group) { recorded_as_.store(group, std::memory_order_relaxed); }

    // Processes pending input once, or returns immediately if another thread is doing so.
    void poll();
    // Sets the waiter that is woken when any thread breaks the group; nullptr if there is none.
    void on_failure(link::Waiter* waiter);
    // Returns the outcome that broke the group, or nullopt if the group is not broken.
    std::optional<Outcome> failure();
    // Breaks the group on this rank and sends the failure report to all other ranks. Returns the outcome that first
    // broke the group.
    Outcome fail(Outcome outcome);
    // Breaks the group as `aborted`; any thread may call this while others are waiting in the group.
    void abort();
    // Announces to all other ranks that this rank is waiting in a call.
    void announce(const CallHeader& header);
    // Returns the latest call that each rank has announced.
    std::vector<CallHeader> announced();
    // These functions record calls that were not announced. `record_received` records a call whose header arrived from
    // `peer`; `record_completed` records a call that has completed and therefore was begun by all ranks.
    void record_received(int peer, const CallHeader& header);
    void record_completed(const CallHeader& header);
    // Returns the latest call of each rank, announced or recorded; its operation is `none` if no call is known.
    std::vector<CallHeader> latest();
    // Answers the peers' pending queries, except those whose answers are not known yet.
    void answer();
    void serve() override;
    bool send_query(int global_rank, const CallId& call) override;
    // Returns the number of frames pending for `peer`.
    std::size_t queued(int peer);
    // Returns the ranks that have sent a goodbye.
    std::vector<int> left();
    // Returns the outcome of a call that fails because `peer` died or left.
    Outcome peer_lost_outcome(int peer);

  private:
    struct OutgoingFrame {
        Frame frame;
        std::vector<std::uint8_t> owned_body;  // the body, if the messenger owns it
        std::shared_ptr<Request> request;      // the request whose tensor is the body, if `owned_body` is empty
        std::size_t sent = 0;                  // bytes of frame and body
    };
    struct UnexpectedMessage {  // a message that has arrived
        Frame frame;
        int peer;
        std::vector<std::uint8_t> bytes;
    };
    struct Query {
        CallId call;
        std::chrono::steady_clock::time_point arrived_at;
    };
    struct PeerState {
        std::deque<OutgoingFrame> outgoing;
        std::map<std::uint64_t, std::shared_ptr<Request>> offered;   // offered sends by id; removed when accepted
        std::map<std::uint64_t, std::shared_ptr<Request>> accepted;  // accepting receives by id; removed when complete
        std::map<std::uint64_t, std::size_t> remaining;              // bytes still missing, by the ids in `accepted`
        std::uint64_t next_id = 1;
        std::size_t eager_out = 0;    // charges of eager messages sent but not credited yet
        std::size_t eager_in = 0;     // charges of eager messages consumed but not credited yet
        std::size_t eager_held = 0;   // charges of eager messages received but not credited yet
        std::size_t offers_held = 0;  // number of received offers without a matching receive
        std::uint64_t latest_id = 0;  // the latest id of an arrived message
        // The frame that is being received.
        Frame frame;
        std::size_t frame_read = 0;
        std::vector<std::uint8_t> body;
        std::size_t body_read = 0;
        std::shared_ptr<Request> body_for;
        CallHeader announced{};
        std::vector<Query> queries;    // unanswered queries from the peer
        bool is_write_closed = false;  // the lane rejects further frames but may still contain unread ones
        bool left = false;
        bool lost = false;
        FailureCause cause;  // the reason why the peer left, if it reported one
    };

    std::vector<CallHeader> latest_locked();
    PeerState& state(int peer) { return states_[static_cast<std::size_t>(peer)]; }

    bool progress();
    bool flush(int peer);
    bool receive_from(int peer);
    bool begin_body(int peer);
    void end_body(int peer);
    bool is_next(int peer);
    static bool matches_envelope(const Frame& frame, int peer, const Request& request);
    std::list<std::shared_ptr<Request>>::iterator posted_for(const Frame& frame, int peer);
    void arrive(UnexpectedMessage message);
    void complete_with(UnexpectedMessage& message, const std::shared_ptr<Request>& request);
    void accept(int peer, const Frame& offer, const std::shared_ptr<Request>& request);
    void credit(int peer, std::size_t nbytes);
    static bool matches(const Frame& frame, const Request& request);
    void fail_mismatch(const Frame& frame, int peer, const std::shared_ptr<Request>& request);
    void open(const std::shared_ptr<Request>& request, std::int64_t timeout_ns);
    void push(int peer, Frame frame, std::vector<std::uint8_t> owned_body, std::shared_ptr<Request> request);
    void finish(const std::shared_ptr<Request>& request, Outcome outcome);
    void record_end(Request& request);
    static void copy_body(OutgoingFrame& outgoing);
    Outcome peer_lost_outcome_locked(int peer);
    void report_cause_of(const Outcome& outcome);
    void handle_close(int peer);
    void await_delivery(std::unique_lock<std::mutex>& lock);
    void break_group(Outcome outcome, bool notifies_others);
    void handle_abort();
    void add_query(int peer, const CallId& call);
    void answer_locked();
    std::vector<int> peers_of(const Request& request) const;
    Wait wait_for(const Request& request) const;
    void expire(std::unique_lock<std::mutex>& lock);
    std::shared_ptr<Request> expired();
    std::optional<Outcome> find_timeout_outcome(std::unique_lock<std::mutex>& lock,
                                                const std::shared_ptr<Request>& request);
    void check_silent_peers();
    void check_events(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Request>& until, int iteration,
                      const Interrupted& interrupted);
    void drive(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Request>& until,
               std::chrono::steady_clock::time_point deadline, const Interrupted& interrupted);
    void background();

    link::LaneSet& lanes_;
    link::Waiter waiter_;
    link::Waiter* failure_waiter_ = nullptr;  // woken on a failure
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<PeerState> states_;
    std::mutex headers_mutex_;  // guards `received_headers_` and `completed_header_`; `mutex_` may be held for long
                                // while large messages move
    std::vector<CallHeader> received_headers_;
    CallHeader completed_header_{};
    std::list<std::shared_ptr<Request>> posted_;  // receives without a message, in call order
    std::list<UnexpectedMessage> unexpected_;     // messages without a receive, in order of arrival
    std::list<std::shared_ptr<Request>> open_;    // requests that are not done
    std::atomic<std::uint32_t> recorded_as_{0};
    std::optional<WaitChainSearch> search_;  // the search for the ranks that block `searched_request_`
    std::shared_ptr<Request> searched_request_;
    bool searching_ = false;  // a thread is in `search_->advance` without holding `mutex_`
    bool driving_ = false;
    int waiting_threads_ = 0;  // number of threads that wait for a request while another thread drives
    bool closing_ = false;
    std::optional<Outcome> failure_;
    std::atomic<bool> failed_{false};
    std::atomic<bool> abort_requested_{false};
    std::thread thread_;
};

}  // namespace paceline::executor
