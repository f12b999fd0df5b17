// One call or message of this process in its recording (record/recorder.hpp).
#pragma once

#include "call/call.hpp"
#include "record/recorder.hpp"

namespace paceline {

class RecordedCall {
  public:
    // Records that the program has made this call, as the `sequence`-th of the group that the recorder knows by
    // `group`; 0 stands for a group that is not recorded. A synchronous call starts at once.
    void arrive(std::uint32_t group, const Call& call, std::uint64_t sequence, bool is_async);
    // Likewise for a message to or from group rank `peer`, -1 for any.
    void arrive_message(std::uint32_t group, bool receives, DType dtype, std::uint64_t count, int peer,
                        std::int32_t tag);
    // A queued call is the next of its group.
    void start();
    void end(const Observed& observed, const Outcome& outcome);

  private:
    record::CallFields fields_;
    record::WrittenCall written_;
};

}  // namespace paceline
