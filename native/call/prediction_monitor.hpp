// Compares the durations of calls with their predictions, and stores the first kind of call whose duration differs
// greatly from its prediction.
//
// Of the initial calls of each kind, only the shortest is compared, because a rank may be late in some of them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <tuple>

#include "call/call.hpp"

namespace paceline {

// A kind of call whose duration differed greatly from its prediction, with the measurements.
struct PredictionMiss {
    Operation operation = Operation::none;
    std::uint8_t algorithm = 0;
    DType dtype = DType::u8;
    std::uint64_t count = 0;
    std::uint32_t calls = 0;
    std::int64_t min_ns = 0;
    std::int64_t predicted_ns = 0;
};

class PredictionMonitor {
  public:
    static constexpr std::uint32_t kCallsPerKind = 20;  // number of calls of a kind before the comparison
    static constexpr double kMaxRatio = 1.2;            // the largest acceptable ratio between duration and prediction

    // Adds a successful call; calls without a prediction are ignored. Not thread-safe.
    void note(const Call& call, std::int64_t took_ns);

    // Returns the first mispredicted kind of call, or nullopt if there is none or it was already returned. Any thread
    // may call this.
    std::optional<PredictionMiss> take();

  private:
    using CallKind = std::tuple<Operation, std::uint8_t, DType, std::uint64_t>;

    static constexpr std::size_t kMaxKinds = 1024;

    struct Measurements {
        std::uint32_t calls = 0;
        std::int64_t min_ns = 0;
    };

    enum class Stage : std::uint8_t { watching, found, reported };

    std::map<CallKind, Measurements> measured_;
    PredictionMiss prediction_miss_;
    // Set to `found` with release after `prediction_miss_` is written; loaded with acquire before `prediction_miss_` is
    // read.
    std::atomic<Stage> stage_{Stage::watching};
};

}  // namespace paceline
