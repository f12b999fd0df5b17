// A collective call of a rank, and its outcome. All implementations of `Collectives` share these types.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "call/stream.hpp"
#include "reduce/reduce.hpp"
#include "update/update.hpp"

namespace paceline {

namespace executor {
struct Schedule;
}

enum class Operation : std::uint8_t {
    none,
    all_reduce,
    broadcast,
    reduce,
    all_gather,
    reduce_scatter,
    gather,
    scatter,
    all_to_all,
    barrier,
};

// The algorithm number of a call whose tensors are quantised between hosts is this constant plus its Wire. On one host
// nothing is quantised, but the ranks still compare the number.
constexpr std::uint8_t kQuantised = 64;

// Whether a rank can complete the call only after every rank has begun it.
constexpr bool needs_all(Operation operation) {
    return operation == Operation::all_reduce || operation == Operation::all_gather ||
           operation == Operation::reduce_scatter || operation == Operation::all_to_all ||
           operation == Operation::barrier;
}

// Describes a rank's call to the other ranks, which compare the headers in the first round.
struct CallHeader {
    std::uint64_t sequence;  // number of the call in its group, from 1
    std::uint64_t count;     // total elements; for all_to_all the elements that the rank sends, not compared
    std::int32_t root;       // group rank, or -1 if the operation has no root
    Operation operation;
    DType dtype;
    ReduceOp reduce_op;
    std::uint8_t shared;     // on one host: the tensor is in the shared region described below; not compared
    std::uint64_t region;    // not compared
    std::uint64_t offset;    // not compared
    std::uint8_t algorithm;  // the schedule's algorithm, or 0; see kQuantised
    std::uint8_t reserved[7];

    bool fits(const CallHeader& other) const {
        return sequence == other.sequence && (count == other.count || operation == Operation::all_to_all) &&
               root == other.root && operation == other.operation && dtype == other.dtype &&
               reduce_op == other.reduce_op && algorithm == other.algorithm;
    }
};

// Whether all enum values in a header received from another rank are valid.
inline bool is_sound(const CallHeader& header) {
    return header.operation <= Operation::barrier && header.dtype <= DType::c32 && header.reduce_op <= ReduceOp::none;
}

// The reason why a rank gives up: another rank died, left, or delayed a call until it timed out. `rank` is the name
// that all groups of a process use for that rank.
struct Cause {
    int rank = -1;  // -1: no cause
    bool left = false;
    bool hung = false;

    bool known() const { return rank >= 0; }
    bool operator==(const Cause&) const = default;
    // Encodes the cause as a number that is sent to other ranks; 0 means no cause.
    std::uint32_t pack() const {
        if (!known()) return 0;
        return static_cast<std::uint32_t>(rank) << 1 | 1U | (left ? kLeft : 0) | (hung ? kHung : 0);
    }
    static Cause unpack(std::uint32_t packed) {
        if (packed == 0) return {};
        return {static_cast<int>((packed & ~(kLeft | kHung)) >> 1), (packed & kLeft) != 0, (packed & kHung) != 0};
    }
    static constexpr std::uint32_t kLeft = std::uint32_t{1} << 31;
    static constexpr std::uint32_t kHung = std::uint32_t{1} << 30;
};

// The values are those of paceline.comm.engine.failures.OutcomeCode, where 6 means an error of another library.
// schedule_unfit: the schedule uses blocks that the call does not have. Nothing was started; the group remains usable.
// starved: the rank in `missing` ran out of descriptors or memory for another rank's tensor. too_many_offers:
// kMostOffers messages to a rank already wait for its receives; `missing` is that rank. The message was not sent; the
// group remains usable. aborted: `reporter` called `Collectives::abort`.
enum class Code {
    ok,
    mismatch,
    timed_out,
    peer_lost,
    interrupted,
    schedule_unfit,
    starved = 7,
    too_many_offers = 8,
    aborted = 9,
};

struct Outcome {
    Code code = Code::ok;
    std::vector<int> missing;  // group ranks that did not arrive
    bool came = false;         // the ranks in `missing` have begun the call, but it waits for them
    // timed_out: the ranks in `missing` that are not to blame because they wait in other calls. If these are all of
    // `missing` and `held_by` is empty, the ranks wait for each other.
    std::vector<int> waiting;
    std::vector<int> held_by;  // timed_out: the ranks to blame that are not in `missing`, as names, not group ranks
    std::vector<int> gone;     // the ranks in `missing` that died or left
    std::vector<int> left;     // the ranks in `missing` that left cleanly
    Cause cause;               // why the ranks in `gone` gave up, if they reported it; it has a name, not a group rank
    int reporter = -1;         // the group rank that gave up first; -1 means this rank
    std::int64_t waited_ns = 0;
    // all_to_all: the two ranks that disagree on the number of bytes between them; otherwise -1.
    int split_from = -1;
    int split_to = -1;
    std::uint64_t split_sent = 0;
    std::uint64_t split_expected = 0;
    std::uint32_t step = 0;         // schedule_unfit: the first step that does not fit
    std::vector<CallHeader> calls;  // by group rank; for a missing peer, its latest call
};

// Observations of a group during a call, for the recording.
struct Observed {
    int last_arrived = -1;         // the group rank that arrived last, or -1 if unknown
    std::uint64_t complete = 0;    // the time of this observation, in ticks of the recording's clock
    std::uint64_t shm_nbytes = 0;  // sent by this rank
    std::uint64_t tcp_nbytes = 0;
};

struct Call {
    Operation operation = Operation::none;
    DType dtype = DType::u8;
    ReduceOp reduce_op = ReduceOp::none;
    int root = -1;
    std::uint64_t count = 0;
    // One, or one for each rank (scatter, reduce_scatter, all_to_all). An all_reduce may have one only on one host: it
    // is as long as the output and does not change.
    std::vector<Stream> inputs;
    std::vector<Stream> outputs;  // one, or one for each rank (gather, all_gather, all_to_all)
    // A reduce_scatter may have an update only on one host: it is applied to the results, which then need no output.
    std::shared_ptr<update::Update> update;
    std::int64_t timeout_ns = 0;
    std::uint64_t region = 0;  // 0: the tensor is not in a shared region
    std::uint64_t offset = 0;
    std::shared_ptr<const executor::Schedule> schedule;  // used only by groups that run schedules
    std::uint8_t algorithm = 0;                          // the schedule's, or kQuantised plus the wire format
    std::int64_t predicted_ns = 0;                       // the predicted duration; 0: no prediction
    float* residual = nullptr;                           // for error feedback; see wire/wire.hpp
    std::size_t residual_count = 0;
    Observed observed;  // the group stores it
    // Called once before the thread waits, except very briefly, for another rank or another call. Set only for small
    // calls of a group on one host, which may complete before that; otherwise null.
    const std::function<void()>* before_waiting = nullptr;
    // For an asynchronous call: returns whether the program waits for it or for a later call.
    const std::function<bool()>* is_awaited = nullptr;
};

// Whether a thread of the program waits in the call.
inline bool holds_program(const Call& call, bool background) {
    return !background || (call.is_awaited != nullptr && (*call.is_awaited)());
}

// Called before the thread waits.
inline void will_wait(Call& call) {
    if (call.before_waiting != nullptr) (*call.before_waiting)();
    call.before_waiting = nullptr;
}

// Returns the count that the call's header reports.
inline std::uint64_t count_in_header(const Call& call) {
    if (call.operation != Operation::all_to_all) return call.count;
    std::uint64_t nbytes = 0;
    for (const Stream& each : call.inputs) nbytes += each.nbytes();
    return nbytes / item_size(call.dtype);
}

// Called from time to time while a call waits; returning true ends the call as `interrupted`.
using Interrupted = std::function<bool()>;

// Runs the calls of one group, one at a time and in order. A call whose headers do not match fails on every rank; after
// any other failure the group is broken, and every later call fails in the same way.
class Collectives {
  public:
    virtual ~Collectives() = default;
    virtual Outcome run(Call& call, const Interrupted& interrupted, bool background) = 0;
    // Ends the waiting calls of all ranks, and all later calls, as `aborted`. Any thread may call this while another
    // thread is in `run`; it does not wait for that thread.
    virtual void abort() = 0;
    // The reason why the group is broken, as far as this rank has detected it outside a call; `ok` if it is not broken.
    // Any thread may call this.
    virtual Code failure() = 0;
    // Whether each rank has a core for the thread of asynchronous calls in addition to the cores that it computes on,
    // so that this thread may busy-wait.
    virtual bool has_spare_core() const { return false; }
};

}  // namespace paceline
