// Compares the durations of calls with their predictions, and keeps the first kind of call that was far off.
//
// The shortest of the first calls of a kind counts, since in some of these calls a rank was late.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <tuple>

#include "call/call.hpp"

namespace paceline {

// A kind of call whose duration was far from its prediction.
struct Surprise {
    Operation operation = Operation::none;
    std::uint8_t algorithm = 0;
    DType dtype = DType::u8;
    std::uint64_t count = 0;
    std::uint32_t calls = 0;
    std::int64_t least_ns = 0;
    std::int64_t predicted_ns = 0;
};

class Foresight {
  public:
    static constexpr std::uint32_t kCalls = 20;  // the calls of a kind before it is judged
    static constexpr double kFar = 1.2;          // the ratio, in either direction, from which a duration is far off

    // Notes a successful call; ignores a call without a prediction. Calls of one group do not overlap.
    void note(const Call& call, std::int64_t took_ns);

    // Returns the kind that was far off, only once; any thread may call this.
    std::optional<Surprise> take();

  private:
    using Kind = std::tuple<Operation, std::uint8_t, DType, std::uint64_t>;

    static constexpr std::size_t kMostKinds = 1024;

    struct Seen {
        std::uint32_t calls = 0;
        std::int64_t least_ns = 0;
    };

    enum class Progress : std::uint8_t { watching, found, told };

    std::map<Kind, Seen> seen_;
    Surprise surprise_;
    // `found` is stored with release after `surprise_` is written, and loaded with acquire before it is read.
    std::atomic<Progress> progress_{Progress::watching};
};

}  // namespace paceline
