// Copies a rank's data into its slot, either through the cache or directly to memory.
//
// Ranks whose cores share a cache read each other's data fastest from that cache. If two cores do not share a cache,
// fetching a line from the other core's cache takes several times as long as fetching it from memory. The faster method
// changes when the scheduler or a hypervisor moves a rank. A group therefore measures both methods in some of its calls
// and uses the faster method in all other calls. All ranks measure the same calls.
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

enum class CopyMethod : std::uint8_t { cached, streamed };

#if defined(__x86_64__)
constexpr bool kCanStream = true;
#else
constexpr bool kCanStream = false;  // arm64 has no store instruction that reliably bypasses the cache
#endif

// Measurements of both methods for calls with the same operation and about the same size.
class CopyMethodSelector {
  public:
    static constexpr std::uint32_t kInitialCalls = 64;   // number of initial calls, which are measured more often
    static constexpr std::uint32_t kInitialPeriod = 16;  // initial calls per measurement of each method
    static constexpr std::uint32_t kPeriod = 256;        // later calls per measurement of each method

    // Returns the method for the next call, and whether to measure the call.
    std::pair<CopyMethod, bool> next();
    // Adds the time per byte of a measured call, excluding waits for other ranks.
    void add_measurement(CopyMethod method, float ticks_per_byte);

  private:
    static constexpr std::size_t kKeptMeasurements = 4;  // several, because losing a core may disturb some of them
    static constexpr float kStreamedThreshold = 0.9F;    // use streaming below this ratio of streamed to cached time

    struct Timings {
        std::array<float, kKeptMeasurements> latest{};
        std::uint32_t count = 0;

        float least() const {
            return *std::min_element(latest.begin(),
                                     latest.begin() + std::min(count, std::uint32_t{kKeptMeasurements}));
        }
    };

    std::uint32_t calls_ = 0;
    CopyMethod best_ = CopyMethod::cached;
    std::array<Timings, 2> timings_;  // indexed by method
};

// Copies like memcpy but bypasses the cache if possible. The copied data is visible before later stores by this thread.
void copy_streamed(std::uint8_t* to, const std::uint8_t* from, std::size_t nbytes);

// Performs and measures the copies of one group.
class SlotCopier {
  public:
    // Prepares for a call that stages `nbytes` bytes.
    void begin(Operation operation, std::size_t nbytes);
    // Finishes a successful call; adds its measurement if it copied data into slots.
    void end();

    // Copies the next `nbytes` of a stream into a slot.
    void stage_next(ByteStream& from, std::uint8_t* slot, std::size_t nbytes) const;
    // Copies the next `nbytes` of a stream into a slot without advancing the stream.
    void stage(const ByteStream& from, std::uint8_t* slot, std::size_t nbytes) const;

    // Runs and times a part of a call in which this rank does not wait for others.
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
    static constexpr std::size_t kMin = 2 << 10;   // bytes per call below which the methods hardly differ
    static constexpr std::size_t kSizes = 22;      // number of size classes: `kMin` times powers of two
    static constexpr std::size_t kOperations = 3;  // operations in which all ranks stage and read in the same way

    std::array<std::array<CopyMethodSelector, kSizes>, kOperations> selectors_;
    CopyMethodSelector* selector_ = nullptr;  // for the current call; null if such calls are never measured
    CopyMethod method_ = CopyMethod::cached;
    bool is_measured_ = false;
    std::size_t nbytes_ = 0;
    std::uint64_t ticks_ = 0;
};

}  // namespace paceline::host
