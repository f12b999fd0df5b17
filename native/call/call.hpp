// A rank's collective call and its outcome. All implementations of `Collectives` share these types.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "call/byte_stream.hpp"
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

// For a call that quantizes tensors between hosts, the algorithm number is this constant plus the call's Wire. On one
// host nothing is quantized, but the ranks still compare the number.
constexpr std::uint8_t kQuantized = 64;

// Returns true if no rank can complete the operation before every rank has begun it.
constexpr bool needs_all(Operation operation) {
    return operation == Operation::all_reduce || operation == Operation::all_gather ||
           operation == Operation::reduce_scatter || operation == Operation::all_to_all ||
           operation == Operation::barrier;
}

// Describes a rank's call. The ranks exchange their headers in the first round and compare them.
struct CallHeader {
    std::uint64_t sequence;  // the call's number in its group, counted from 1
    std::uint64_t count;     // total number of elements; for all_to_all, the number that this rank sends (not compared)
    std::int32_t root;       // group rank, or -1 if the operation has no root
    Operation operation;
    DType dtype;
    ReduceOp reduce_op;
    std::uint8_t shared;     // whether, on one host, the tensor is in the shared region described below; not compared
    std::uint64_t region;    // not compared
    std::uint64_t offset;    // not compared
    std::uint8_t algorithm;  // the schedule's algorithm, or 0; see kQuantized
    std::uint8_t reserved[7];

    bool matches(const CallHeader& other) const {
        return sequence == other.sequence && (count == other.count || operation == Operation::all_to_all) &&
               root == other.root && operation == other.operation && dtype == other.dtype &&
               reduce_op == other.reduce_op && algorithm == other.algorithm;
    }
};

// Returns true if all enum values in a header received from another rank are valid.
inline bool is_valid(const CallHeader& header) {
    return header.operation <= Operation::barrier && header.dtype <= DType::c32 && header.reduce_op <= ReduceOp::none;
}

// The reason why a rank fails its calls: another rank died, left, or delayed a call until it timed out. `rank` is a
// global rank, that is, a rank in the default group.
struct FailureCause {
    int rank = -1;  // -1: no cause
    bool left = false;
    bool hung = false;

    bool known() const { return rank >= 0; }
    bool operator==(const FailureCause&) const = default;
    // Encodes the cause as a number that is sent to other ranks; 0 means no cause.
    std::uint32_t pack() const {
        if (!known()) return 0;
        return static_cast<std::uint32_t>(rank) << 1 | 1U | (left ? kLeft : 0) | (hung ? kHung : 0);
    }
    static FailureCause unpack(std::uint32_t packed) {
        if (packed == 0) return {};
        return {static_cast<int>((packed & ~(kLeft | kHung)) >> 1), (packed & kLeft) != 0, (packed & kHung) != 0};
    }
    static constexpr std::uint32_t kLeft = std::uint32_t{1} << 31;
    static constexpr std::uint32_t kHung = std::uint32_t{1} << 30;
};

// The values are those of paceline.comm.engine.channel.OutcomeCode, where 6 means an error from another library.
// schedule_unfit: the schedule uses blocks that the call does not have. Nothing was started; the group remains usable.
// starved: the rank in `missing` ran out of descriptors or memory when it mapped another rank's tensor.
// too_many_offers: kMaxOffers messages are already waiting for receives on the rank in `missing`. The message was not
// sent; the group remains usable. aborted: `reporter` called `Collectives::abort`.
enum class OutcomeCode {
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
    OutcomeCode code = OutcomeCode::ok;
    std::vector<int> missing;  // group ranks that did not arrive
    bool has_begun = false;    // true if the ranks in `missing` have begun the call but not finished their part
    // timed_out: the ranks in `missing` that are waiting in other calls and therefore are not responsible. A deadlock
    // is reported if `waiting` equals `missing` and `blocked_by` is empty.
    std::vector<int> waiting;
    std::vector<int> blocked_by;  // timed_out: the global ranks of responsible ranks that are not in `missing`
    std::vector<int> gone;        // the ranks in `missing` that died or left
    std::vector<int> left;        // the ranks in `missing` that left cleanly
    FailureCause cause;           // the reason that the ranks in `gone` reported, if any; its `rank` is a global rank
    int reporter = -1;            // the group rank that detected the failure; -1 means this rank
    std::int64_t waited_ns = 0;
    // all_to_all: the sender and the receiver that expect different numbers of bytes for the transfer between them, or
    // -1.
    int split_from = -1;
    int split_to = -1;
    std::uint64_t split_sent = 0;
    std::uint64_t split_expected = 0;
    std::uint32_t step = 0;         // schedule_unfit: the first step that does not fit
    std::vector<CallHeader> calls;  // indexed by group rank; a missing rank's entry is its latest call
};

// Data that a group collects about each of its calls for the recording.
struct CallMetrics {
    int last_arrived = -1;         // the group rank that arrived last, or -1 if unknown
    std::uint64_t complete = 0;    // time of the last rank's arrival, in recorder ticks; 0: not measured
    std::uint64_t shm_nbytes = 0;  // sent by this rank
    std::uint64_t tcp_nbytes = 0;
};

struct Call {
    Operation operation = Operation::none;
    DType dtype = DType::u8;
    ReduceOp reduce_op = ReduceOp::none;
    int root = -1;
    std::uint64_t count = 0;
    // A single stream, or one per rank (scatter, reduce_scatter, all_to_all). all_reduce accepts an input only on one
    // host; the input is as long as the output and is not modified.
    std::vector<ByteStream> inputs;
    std::vector<ByteStream> outputs;  // a single stream, or one per rank (gather, all_gather, all_to_all)
    // An optimizer update to apply to the results of reduce_scatter, which then needs no output; supported only on one
    // host.
    std::shared_ptr<update::Update> update;
    std::int64_t timeout_ns = 0;
    std::uint64_t region = 0;  // 0: the tensor is not in a shared region
    std::uint64_t offset = 0;
    std::shared_ptr<const executor::Schedule> schedule;  // used only by groups that run schedules
    std::uint8_t algorithm = 0;                          // the schedule's algorithm, or kQuantized plus the wire format
    std::int64_t predicted_ns = 0;                       // the predicted duration; 0: no prediction
    float* residual = nullptr;                           // rounding errors for error feedback (wire/wire.hpp), or null
    std::size_t residual_count = 0;
    CallMetrics metrics;  // written by the group
    // Called once, before the thread waits for another rank or another call for longer than a brief spin. Null except
    // for small calls on one host, which may complete without such a wait.
    const std::function<void()>* before_waiting = nullptr;
    // Returns true if the program is waiting for this asynchronous call or a later one. Null for synchronous calls.
    const std::function<bool()>* is_awaited = nullptr;
};

// Returns true if a thread other than the background thread is waiting for the call.
inline bool blocks_program(const Call& call, bool background) {
    return !background || (call.is_awaited != nullptr && (*call.is_awaited)());
}

// Runs `before_waiting` unless it has already run.
inline void notify_before_waiting(Call& call) {
    if (call.before_waiting != nullptr) (*call.before_waiting)();
    call.before_waiting = nullptr;
}

// Returns the value of `CallHeader::count` for the call.
inline std::uint64_t count_in_header(const Call& call) {
    if (call.operation != Operation::all_to_all) return call.count;
    std::uint64_t nbytes = 0;
    for (const ByteStream& each : call.inputs) nbytes += each.nbytes();
    return nbytes / item_size(call.dtype);
}

// A callback that a blocked call runs periodically. If it returns true, the call fails as `interrupted`.
using Interrupted = std::function<bool()>;

// Runs the calls of one group sequentially. A call with mismatched headers fails on every rank and leaves the group
// usable. Any other failure breaks the group, and every later call fails with the same outcome.
class Collectives {
  public:
    virtual ~Collectives() = default;
    virtual Outcome run(Call& call, const Interrupted& interrupted, bool background) = 0;
    // Fails all current and later calls, on all ranks, as `aborted`. Any thread may call this while another thread is
    // in `run`; `abort` does not wait for that thread.
    virtual void abort() = 0;
    // Returns the reason why the group is broken, as far as this rank can determine it between calls, or `ok`. Any
    // thread may call this.
    virtual OutcomeCode failure() = 0;
    // Returns true if each rank has a spare core on which its thread for asynchronous calls can busy-wait.
    virtual bool has_spare_core() const { return false; }
};

}  // namespace paceline
