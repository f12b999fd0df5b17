// Compares the durations of calls with their predictions and stores the first kind of call that differs greatly.
//
// Only the shortest of the first calls of each kind is compared, because a rank may be late in some of them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <tuple>

#include "call/call.hpp"

namespace paceline {

// A kind of call whose duration differed greatly from its prediction, and the measurements.
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
    static constexpr std::uint32_t kCalls = 20;  // number of calls of a kind before the comparison
    static constexpr double kFar = 1.2;          // the largest acceptable ratio between duration and prediction

    // Adds a successful call, and ignores calls without a prediction. Not thread-safe.
    void note(const Call& call, std::int64_t took_ns);

    // Returns the kind of call that differed greatly, only once. Any thread may call this.
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
    // Set to `found` with release after `surprise_` is written; loaded with acquire before `surprise_` is read.
    std::atomic<Progress> progress_{Progress::watching};
};

}  // namespace paceline
