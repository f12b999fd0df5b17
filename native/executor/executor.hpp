// Runs schedules over a group's lanes. Every step has a watermark: the number of bytes of its slice that have been
// processed. A step advances as far as the watermarks of its dependencies allow. Large slices are thereby pipelined
// without being split: the front of a block is reduced and forwarded while the rest is still arriving. Steps with the
// same peer keep their order; steps with different peers do not wait for each other.
//
// A message consists of a header, which describes the call and the message's length, and the message's bytes; a long
// message is striped over the peer's lanes (stripes.hpp). The receiver compares the header with its own call and
// reports a mismatch to all ranks (messenger.hpp). Any failure breaks the group.
#pragma once

#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "call/call.hpp"
#include "call/wait_chain.hpp"
#include "executor/messenger.hpp"
#include "executor/schedule.hpp"
#include "executor/tensor_bytes.hpp"
#include "link/lane_set.hpp"

namespace paceline::executor {

class Executor final : public Collectives {
  public:
    Executor(link::LaneSet& lanes, Messenger& messenger);
    Executor(const Executor&) = delete;
    Executor& operator=(const Executor&) = delete;
    ~Executor() override;

    Outcome run(Call& call, const Interrupted& interrupted, bool background) override;
    void abort() override { messenger_.abort(); }
    OutcomeCode failure() override;

  private:
    struct StepState {
        std::size_t dst_offset = 0;  // byte offsets of the step's slices in their buffers
        std::size_t src_offset = 0;
        std::size_t nbytes = 0;  // for a conversion, the size of the floats in bytes
        std::size_t done = 0;    // the watermark
        bool finished = false;
    };
    struct Extent {  // the range of a slice in its buffer, in bytes
        std::size_t offset = 0;
        std::size_t nbytes = 0;
    };
    // The position of a step's `src` or `dst` in its buffer, and the step's progress there. Both are measured in bytes
    // of that buffer, because a packed block has fewer bytes than its floats.
    struct Operand {
        std::size_t offset;
        std::size_t nbytes;
        std::size_t done;
        bool packed;
    };
    struct Header {
        std::uint32_t magic;
        std::uint32_t step;  // the sender's step, for error messages
        std::uint64_t nbytes;
        CallHeader call;

        static constexpr std::uint32_t kMagic = 0x504c4332;
    };
    static_assert(sizeof(Header) == 64);
    // The progress of one lane on its stripes of the current message.
    struct LaneState {
        std::size_t moved = 0;
        std::size_t carried = 0;  // bytes of an incomplete element, at the front of `staging`
        std::vector<std::uint8_t> staging;
    };
    struct FlowDirection {      // one direction of a flow
        std::size_t next = 0;   // index of the current step in the flow's sends or receives
        std::size_t begun = 0;  // bytes of the header transferred so far
        std::size_t padding = 0;
        Header header;
        std::vector<LaneState> lanes;
    };
    struct FlowState {
        const Flow* flow;
        std::vector<std::unique_ptr<link::Lane>>* lanes;
        FlowDirection sending;
        FlowDirection receiving;
    };

    std::optional<std::uint32_t> lay_out_buffers(Call& call);
    std::optional<std::uint32_t> lay_out_wire(const Call& call);
    void observe_traffic(CallMetrics& metrics);
    bool place_step(const Step& step, StepState& step_state) const;
    bool can_convert(const Step& step, const StepState& step_state) const;
    std::optional<Extent> extent_of(const Slice& slice) const;
    const TensorBytes& buffer(const Slice& slice) const { return buffers_[static_cast<std::size_t>(slice.buffer)]; }
    Operand operand(std::uint32_t step, bool dst) const;
    std::optional<std::size_t> limit(std::uint32_t step) const;
    bool all_received_before(std::uint32_t step) const;
    void finish(StepState& step_state);
    void finish_message(FlowState& state, FlowDirection& direction, StepState& step_state);
    bool over() const;
    bool progress();
    bool send(FlowState& state);
    bool receive(FlowState& state);
    bool run_local_steps();
    bool copy(std::uint32_t step, std::size_t until);
    bool convert(std::uint32_t step, std::size_t until);
    void convert_run(std::uint32_t step, std::uint8_t* floats, std::size_t nbytes);
    void convert_split_group(std::uint32_t step, const TensorBytes& floats, std::size_t at, std::size_t nbytes);
    bool receive_lane(FlowState& state, std::size_t lane, std::uint32_t step, std::size_t offset, std::size_t count);
    bool reduce_lane(FlowState& state, std::size_t lane, std::uint32_t step, std::size_t offset, std::size_t count);
    void reduce_bytes(std::uint32_t step, std::size_t offset, const std::uint8_t* received, std::size_t nbytes);
    bool check_header(FlowState& state, std::uint32_t step);
    void lost(int peer);
    void poll();
    void poll_control_lanes();
    bool check_events(int iteration, const Interrupted& interrupted, bool blocks_program, WaitRegistry::Entry& entry);
    std::vector<int> awaited() const;
    std::function<bool(int)> has_begun() const;
    std::vector<int> absent() const;
    bool attribute_timeout(Outcome& outcome, std::int64_t waited_ns);

    link::LaneSet& lanes_;
    Messenger& messenger_;
    link::Waiter waiter_;
    std::uint64_t sequence_ = 0;
    std::array<CallHeader, 64> recent_headers_{};        // by sequence number modulo the size
    std::chrono::steady_clock::time_point last_poll_{};  // when the messenger was last polled
    std::uint32_t seen_changes_ = 0;                     // the latest value of `LaneSet::changes` that was processed
    std::vector<std::uint8_t> scratch_;
    std::unique_ptr<std::uint8_t[]> wire_;  // packed blocks; its pages are allocated on first use
    std::size_t wire_room_ = 0;

    // The current call:
    const Schedule* schedule_ = nullptr;
    CallHeader header_{};
    std::vector<StepState> states_;
    TensorBytes buffers_[kBuffers];
    std::vector<std::size_t> starts_[kBuffers];  // the starts of each buffer's blocks, and the end of the last block
    std::vector<FlowState> flows_;
    std::size_t open_ = 0;         // the number of unfinished steps
    std::size_t first_local_ = 0;  // index in the schedule's `local` list; all earlier steps are finished
    std::size_t item_ = 1;
    const WireKernels* wire_kernels_ = nullptr;
    float* residual_ = nullptr;  // the rounding errors of earlier calls; null without error feedback
    std::size_t residual_count_ = 0;
    bool averages_ = false;
    ReduceFn reduce_ = nullptr;
    ReduceFn reduce_last_ = nullptr;
    bool failed_ = false;
    std::optional<std::chrono::steady_clock::time_point> failed_at_;  // when this rank detected the failure
    std::optional<WaitChainSearch> search_;                           // set once the call has timed out
    Outcome outcome_;
    std::int64_t timeout_ns_ = 0;
    std::chrono::steady_clock::time_point started_{};
};

}  // namespace paceline::executor
