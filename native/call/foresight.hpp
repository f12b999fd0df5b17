// Compares how long calls take with what was predicted for them, and keeps the first kind of call that was far off.
//
// Of a kind's first calls the shortest counts, since in some of them a rank was late.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <tuple>

#include "call/call.hpp"

namespace paceline {

// A kind of calls that took longer, or less long, than was predicted.
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
    static constexpr std::uint32_t kCalls = 20;  // of a kind, before it is judged
    static constexpr double kFar = 1.2;          // times longer or shorter

    // Notes a call that has succeeded; one without a prediction is left out. Calls of one group do not overlap.
    void note(const Call& call, std::int64_t took_ns);

    // Returns what was far off, the first time that it is asked after that; for any thread.
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
    // `found` is stored with release after `surprise_`, and loaded with acquire before that is read.
    std::atomic<Progress> progress_{Progress::watching};
};

}  // namespace paceline
