// One call or message in the recording of this process (record/recorder.hpp).
#pragma once

#include "call/call.hpp"
#include "record/recorder.hpp"

namespace paceline {

class RecordedCall {
  public:
    // Records that the program has made this call, the `sequence`-th of the group with the serial number `group`; 0
    // means a group that is not recorded. A synchronous call starts at once.
    void arrive(std::uint32_t group, const Call& call, std::uint64_t sequence, bool is_async);
    // Records a message to or from group rank `peer`, or from any rank if it is -1.
    void arrive_message(std::uint32_t group, bool receives, DType dtype, std::uint64_t count, int peer,
                        std::int32_t tag);
    // Records that a queued call starts.
    void start();
    void end(const Observed& observed, const Outcome& outcome);

  private:
    record::CallFields fields_;
    record::WrittenCall written_;
};

}  // namespace paceline
