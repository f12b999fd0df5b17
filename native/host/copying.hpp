// Copies of a rank's data into its slot for the other ranks: through the cache, or past the cache into memory.
//
// Ranks on cores that share a cache read each other's data fastest from that cache. On other cores, each line has to be
// fetched from another core's cache, which takes several times as long as fetching it from memory. The faster way
// changes when the scheduler, or the host of a virtual machine, moves a rank. A group therefore measures both ways in a
// few of its calls, which are the same on all ranks, and each rank uses the faster way in the other calls.
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
constexpr bool kCanStream = false;  // no store instruction of arm64 is certain to bypass the cache
#endif

// Measurements of both ways for one kind of call, whose sizes are about the same.
class Experience {
  public:
    static constexpr std::uint32_t kEarly = 64;        // the first calls, in which the ways are measured often
    static constexpr std::uint32_t kEarlyEvery = 16;   // each way is measured once in this many of the first calls
    static constexpr std::uint32_t kLaterEvery = 256;  // and once in this many later calls

    // Returns the way for the next call, and whether the call is measured.
    std::pair<Way, bool> next();
    // Adds the time per byte of a measured call, without its waits for other ranks.
    void learn(Way way, float ticks_per_byte);

  private:
    static constexpr std::size_t kKept = 4;  // the measurements kept, since a rank may lose its core during one
    static constexpr float kWorth = 0.9F;    // the streamed way must take less than this share of the cached way's time

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

// Copies like memcpy, but past the cache if possible; the copied data is visible before later stores of this thread.
void copy_streamed(std::uint8_t* to, const std::uint8_t* from, std::size_t nbytes);

// The copies of a group's calls.
class Copying {
  public:
    // Begins a call that stages `nbytes` bytes.
    void begin(Operation operation, std::size_t nbytes);
    // Ends a successful call, which is measured only if it copied data into slots.
    void end();

    // Copies the next `nbytes` of a stream into a slot.
    void stage_next(Stream& from, std::uint8_t* slot, std::size_t nbytes) const;
    // Copies the next `nbytes` of a stream into a slot without advancing the stream.
    void stage(const Stream& from, std::uint8_t* slot, std::size_t nbytes) const;

    // Runs a part of a call's work that contains no waits, and times it.
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
    static constexpr std::size_t kLeast = 2 << 10;  // bytes of a call, below which the ways hardly differ
    static constexpr std::size_t kSizes = 22;       // from `kLeast` on, each twice the previous one
    static constexpr std::size_t kOperations = 3;   // the operations in which all ranks stage and read in the same way

    std::array<std::array<Experience, kSizes>, kOperations> experiences_;
    Experience* experience_ = nullptr;  // that of the current call; null if calls of its kind are never measured
    Way way_ = Way::cached;
    bool is_measured_ = false;
    std::size_t nbytes_ = 0;
    std::uint64_t ticks_ = 0;
};

}  // namespace paceline::host
