// The entry for one call or message in this process's recording (record/recorder.hpp).
#pragma once

#include "call/call.hpp"
#include "record/recorder.hpp"

namespace paceline {

class RecordedCall {
  public:
    // Records that the program has submitted a call. `group` is the group's serial number, or 0 to record nothing;
    // `sequence` is the call's number in its group. A synchronous call starts immediately.
    void arrive(std::uint32_t group, const Call& call, std::uint64_t sequence, bool is_async);
    // Records a message to or from group rank `peer`. For a receive from any rank, `peer` is -1.
    void arrive_message(std::uint32_t group, bool receives, DType dtype, std::uint64_t count, int peer,
                        std::int32_t tag);
    // Records the start of a queued call.
    void start();
    void end(const CallMetrics& metrics, const Outcome& outcome);

  private:
    record::CallFields fields_;
    record::CallEntryHandle entry_;
};

}  // namespace paceline
