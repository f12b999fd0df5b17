// Collectives over shared memory, for a group whose ranks are all on one host.
//
// One call runs at a time; `run` is not thread-safe (see call_queue.hpp). A call whose headers do not match fails in
// the same way on every rank and leaves the group usable; any other failure breaks the group, and every later call
// fails in the same way.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <vector>

#include "call/wait_chain.hpp"
#include "host/layout.hpp"
#include "host/slot_copier.hpp"
#include "shm/group_segment.hpp"
#include "shm/host_mesh.hpp"

namespace paceline::host {

using shm::RankSet;

class Group final : public Collectives {
  public:
    // `members[r]` is the mesh rank of group rank r; `id` is unique to the group and the same on every member.
    // `threads` is the number of compute threads in this process. `domain` overrides the detected domain of this rank,
    // for tests. Returns nullptr if a member does not arrive by `deadline`. Throws std::system_error if descriptors or
    // memory run out.
    static std::unique_ptr<Group> create(shm::HostMesh& mesh, std::vector<int> members, std::uint64_t id,
                                         std::size_t slot_bytes, std::chrono::steady_clock::time_point deadline,
                                         int threads = 1, std::optional<LocalityDomain> domain = std::nullopt);
    Group(const Group&) = delete;
    Group& operator=(const Group&) = delete;
    ~Group() override;

    Outcome run(Call& call, const Interrupted& interrupted, bool background) override;
    void abort() override;
    OutcomeCode failure() override;
    bool has_spare_core() const override { return has_spare_core_; }

  private:
    Group(shm::HostMesh& mesh, std::vector<int> members, std::uint64_t id, std::size_t slot_bytes);

    void configure_for_cores();
    ControlPage& control(int rank) const {
        return *std::launder(
            reinterpret_cast<ControlPage*>(controls_ + static_cast<std::size_t>(rank) * kControlBytes));
    }
    Cell& cell(int rank, std::uint32_t round) const { return control(rank).cells[round % kSlots]; }
    // Returns the address, within a rank's slot, of the data that the rank stages in a round of this call.
    std::uint8_t* slot(int rank, std::uint32_t round) const {
        return slots_ + (static_cast<std::size_t>(rank) * kSlots + round % kSlots) * slot_capacity_ +
               round / kSlots % stages_per_slot_ * stage_bytes_;
    }
    void set_stage_bytes(std::size_t nbytes);

    void publish(std::uint32_t round);
    bool await(std::uint32_t round);
    bool await_slowly(int peer, std::uint32_t round);
    bool check_events(int iteration, std::chrono::steady_clock::time_point since,
                      const std::function<RankSet()>& missing, WaitRegistry::Entry& entry);
    void update_wait_entry(const RankSet& ranks, WaitRegistry::Entry& entry) const;
    std::optional<FailureReport> find_timeout_cause(const RankSet& missing, std::int64_t waited_ns);
    bool fail_call(ExitReason reason, const FailureReport& failure_report);
    bool fail_peer_lost(const RankSet& missing, const RankSet& lost, const RankSet& left, std::int64_t waited_ns);
    void withdraw_rounds();
    FailureCause cause_of(int rank) const;
    bool adopt_failure_report(int peer);
    int aborted_by() const;
    bool adopt_abort();
    bool begin(Call& call, const void* payload, std::size_t payload_bytes);
    bool mismatch(std::uint32_t round);
    std::uint64_t sent_nbytes(const Call& call) const;
    RankSet lost() const;
    RankSet left() const;
    RankSet missing_in(std::uint32_t round) const;
    bool has_begun(int rank) const;
    bool have_begun(const RankSet& ranks) const;
    int global_rank_of(int rank) const;
    std::vector<int> global_ranks_of(const std::vector<int>& ranks) const;

    template <class Stage, class Consume>
    bool pipeline(std::size_t rounds, Stage stage, Consume consume);

    bool all_reduce(Call& call);
    bool all_reduce_inline(Call& call);
    bool all_reduce_in_one_round(Call& call);
    std::shared_ptr<shm::Segment> region_of(int rank, shm::RegionId id);
    bool all_reduce_shared(Call& call, std::uint32_t first);
    bool reduce(Call& call);
    void reduce_out_of_slots(const Call& call, ByteStream& tensor, std::size_t nbytes, std::uint32_t round);
    bool reduce_flat(Call& call, bool receives_result);
    bool reduce_large(Call& call, bool receives_result);
    bool reduce_in_slices(Call& call, bool receives_result);
    bool reduce_in_blocks(Call& call, bool receives_result);
    bool broadcast(Call& call);
    bool gather(Call& call, bool receives_result);
    bool reduce_scatter(Call& call);
    bool scatter(Call& call);
    bool all_to_all(Call& call);

    shm::HostMesh& mesh_;
    std::vector<int> members_;
    std::uint64_t id_;
    std::size_t slot_bytes_;             // number of bytes that most calls stage per round
    std::size_t slot_capacity_ = 0;      // the size of a slot in bytes
    std::size_t stage_bytes_ = 0;        // number of bytes of a slot that each round of the call may use
    std::uint32_t stages_per_slot_ = 1;  // the number of such spans in a slot
    int rank_ = 0;
    int size_ = 0;
    std::unique_ptr<shm::GroupSegment> shared_;
    std::uint8_t* controls_ = nullptr;  // in `shared_`, like the slots
    std::uint8_t* slots_ = nullptr;
    std::vector<const void*> sources_;
    SlotCopier slot_copier_;
    shm::ChangeNotifier::Sleeper sleeper_;

    std::uint32_t round_ = 1;        // the next round to publish
    std::uint32_t first_round_ = 1;  // the first round of the latest call
    std::uint64_t sequence_ = 0;
    CallHeader header_{};
    Outcome outcome_;
    bool broken_ = false;
    std::size_t block_ = 0;         // see `reduction_block`
    bool oversubscribed_ = false;   // a busy-waiting rank may take processor time from another rank
    int yields_ = 0;                // the number of yields if `oversubscribed_`
    int poll_interval_factor_ = 1;  // in units of kPollInterval; longer if many ranks share a core
    bool has_spare_core_ = false;

    Call* call_ = nullptr;  // the current call
    const Interrupted* interrupted_ = nullptr;
    bool background_ = false;
    std::int64_t timeout_ns_ = 0;
    std::chrono::steady_clock::time_point started_{};
    bool clock_started_ = false;
    int last_awaited_ = -1;                  // the last rank for which the latest `await` had to wait
    std::optional<WaitChainSearch> search_;  // the search for the ranks that block `call_`; set after a timeout
};

}  // namespace paceline::host
