// Runs schedules over a group's lanes.
//
// Every step has a watermark, the bytes of its slice that are done. A step goes on as far as the earlier steps it
// depends on have come, so that large slices are pipelined without being cut: while a block still arrives, its front is
// reduced and sent on. Steps with one peer keep their order, others do not wait for each other.
//
// A message is a header, which says in what call and how long it is, and its bytes; a long one is dealt out over the
// peer's lanes in stripes. The receiver compares the header with its own call, so a mismatch is seen where it is waited
// for, and tells all ranks (messenger.hpp). Any failure breaks the group.
#pragma once

#include <chrono>
#include <optional>
#include <vector>

#include "call/call.hpp"
#include "executor/memory.hpp"
#include "executor/messenger.hpp"
#include "executor/schedule.hpp"
#include "link/links.hpp"

namespace paceline::executor {

class Executor final : public Collectives {
  public:
    Executor(link::Links& links, Messenger& messenger);
    Executor(const Executor&) = delete;
    Executor& operator=(const Executor&) = delete;
    ~Executor() override;

    Outcome run(Call& call, const Interrupted& interrupted, bool background) override;

  private:
    struct Op {
        std::size_t to = 0;  // where its slices begin, in bytes
        std::size_t from = 0;
        std::size_t nbytes = 0;
        std::size_t done = 0;  // the watermark
        bool finished = false;
    };
    struct Extent {  // of a slice
        std::size_t from = 0;
        std::size_t nbytes = 0;
    };
    struct Header {
        std::uint32_t magic;
        std::uint32_t step;  // of the sender, for messages of errors
        std::uint64_t nbytes;
        CallHeader call;
    };
    static_assert(sizeof(Header) == 64);
    // How far one lane is with the message that it carries its stripes of.
    struct LaneState {
        std::size_t moved = 0;
        std::size_t carried = 0;  // received bytes of an element that is not whole yet, at the front of `staging`
        std::vector<std::uint8_t> staging;
    };
    struct Way {                // one direction of a flow
        std::size_t next = 0;   // among the flow's sends or receives
        std::size_t begun = 0;  // bytes of the header that are through
        std::size_t padding = 0;
        Header header;
        std::vector<LaneState> lanes;
    };
    struct FlowState {
        const Flow* flow;
        std::vector<std::unique_ptr<link::Lane>>* lanes;
        Way sending;
        Way receiving;
    };

    std::optional<std::uint32_t> lay_out(Call& call);
    bool lay_out(const Step& step, Op& op) const;
    std::optional<Extent> extent_of(const Slice& slice) const;
    const Memory& buffer(const Slice& slice) const { return buffers_[static_cast<std::size_t>(slice.buffer)]; }
    std::optional<std::size_t> limit(std::uint32_t step) const;
    bool all_received_before(std::uint32_t step) const;
    void finish(Op& op);
    bool over() const;
    bool progress();
    bool send(FlowState& state);
    bool receive(FlowState& state);
    bool copy();
    bool receive_lane(FlowState& state, std::size_t lane, std::uint32_t step, std::size_t offset, std::size_t count);
    bool reduce_lane(FlowState& state, std::size_t lane, std::uint32_t step, std::size_t offset, std::size_t count);
    void reduce_bytes(std::uint32_t step, std::size_t offset, const std::uint8_t* received, std::size_t nbytes);
    std::size_t lanes_for(const FlowState& state, std::size_t nbytes) const;
    bool check_header(FlowState& state, std::uint32_t step);
    void lost(int peer);
    void poll();
    void hear();
    bool look_around(int slice, const Interrupted& interrupted);
    std::vector<int> awaited() const;
    std::vector<int> missing(const std::vector<CallHeader>& announced) const;

    link::Links& links_;
    Messenger& messenger_;
    link::Waiter waiter_;
    std::uint64_t sequence_ = 0;
    std::chrono::steady_clock::time_point polled_{};  // the messenger
    std::uint32_t heard_ = 0;                         // of the links' news
    std::vector<std::uint8_t> scratch_;

    // Of the call that runs:
    const Schedule* schedule_ = nullptr;
    CallHeader header_{};
    std::vector<Op> ops_;
    Memory buffers_[3];
    std::vector<std::size_t> starts_[3];  // of blocks, and where the last ends
    std::vector<FlowState> flows_;
    std::size_t open_ = 0;  // steps that are not done
    std::size_t copied_ = 0;
    std::size_t item_ = 1;
    ReduceFn reduce_ = nullptr;
    ReduceFn reduce_last_ = nullptr;
    bool failed_ = false;
    std::optional<std::chrono::steady_clock::time_point> broken_at_;  // when this rank heard that the group is
    Outcome outcome_;
    std::int64_t timeout_ns_ = 0;
    std::chrono::steady_clock::time_point started_{};
};

}  // namespace paceline::executor
