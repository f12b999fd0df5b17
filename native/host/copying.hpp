// How a rank copies into its slot what the others will read: through its cache, or past it into memory.
//
// Ranks on cores that share a cache read each other's data fastest out of that cache. On cores that do not, each line
// has to be fetched out of another core's cache, which takes several times as long as to fetch it from memory. Which of
// the two holds changes when the scheduler, or the host of a virtual machine, moves a rank. So a group measures both
// ways in a few of its calls, all ranks in the same ones, and each rank uses in the others what was faster.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "call/call.hpp"
#include "host/layout.hpp"
#include "record/clock.hpp"

namespace paceline::host {

enum class Way : std::uint8_t { cached, streamed };

#if defined(__x86_64__)
constexpr bool kCanStream = true;
#else
constexpr bool kCanStream = false;  // no store of arm64 is sure to go past the cache
#endif

// Learns which way is the faster one for calls of one kind, which are of about the same size.
class Experience {
  public:
    static constexpr std::uint32_t kEarly = 64;        // calls in which the ways are measured often
    static constexpr std::uint32_t kEarlyEvery = 16;   // in those, each way is measured once in so many calls
    static constexpr std::uint32_t kLaterEvery = 256;  // afterwards

    // Returns the way of the next call, and whether its time is to be learned.
    std::pair<Way, bool> next();
    // Takes how long a call took for each byte; waits for other ranks are not part of it.
    void learn(Way way, float ticks_per_byte);

  private:
    static constexpr std::size_t kKept = 4;  // the latest measurements; a rank may lose its core in the middle of one
    static constexpr float kWorth = 0.9F;    // of the time of the cached way, which the streamed one must not need

    struct Times {
        std::array<float, kKept> latest{};
        std::uint32_t count = 0;

        float least() const {
            return *std::min_element(latest.begin(), latest.begin() + std::min(count, std::uint32_t{kKept}));
        }
    };

    std::uint32_t calls_ = 0;
    Way best_ = Way::cached;
    std::array<Times, 2> times_;  // by way
};

// Copies like memcpy, past the cache where it can; what was copied is visible before what this thread stores next.
void copy_streamed(std::uint8_t* to, const std::uint8_t* from, std::size_t nbytes);

// The copies of a group's calls.
class Copying {
  public:
    // Begins a call that stages so many bytes.
    void begin(Operation operation, std::size_t nbytes);
    // Ends it, if it has succeeded; one that copied nothing into slots teaches nothing.
    void end();

    // Copies the next `nbytes` of a stream into a slot.
    void stage_next(Stream& from, std::uint8_t* slot, std::size_t nbytes) const;
    // ... without moving on.
    void stage(const Stream& from, std::uint8_t* slot, std::size_t nbytes) const;

    // Does a part of a call's work that contains no wait.
    template <class Work>
    void timed(Work work) {
        if (!is_measured_) {
            work();
            return;
        }
        const std::uint64_t began = record::ticks();
        work();
        ticks_ += record::ticks() - began;
    }

  private:
    static constexpr std::size_t kLeast = 2 << 10;  // bytes of a call; below, the ways hardly differ
    static constexpr std::size_t kSizes = 22;       // from the least, each twice the one before
    static constexpr std::size_t kOperations = 3;   // in which all ranks stage and read alike

    std::array<std::array<Experience, kSizes>, kOperations> experiences_;
    Experience* experience_ = nullptr;  // of the call that runs; none if it is not measured ever
    Way way_ = Way::cached;
    bool is_measured_ = false;
    std::size_t nbytes_ = 0;
    std::uint64_t ticks_ = 0;
};

}  // namespace paceline::host
