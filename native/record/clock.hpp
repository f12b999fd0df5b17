// The clock of a recording: the processor's time stamp counter if its speed is constant, otherwise CLOCK_MONOTONIC.
#pragma once

#include <time.h>

#include <cstdint>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

#include "record/layout.hpp"

namespace paceline::record {

enum class ClockKind : std::uint32_t { time_stamp_counter = 1, virtual_counter = 2, monotonic = 3 };

ClockKind detect_clock();
inline const ClockKind kClock = detect_clock();

inline std::int64_t nanoseconds_of(clockid_t clock) {
    timespec now{};
    clock_gettime(clock, &now);
    return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// Returns the current time in ticks; never 0.
inline std::uint64_t ticks() {
#if defined(__x86_64__)
    if (kClock == ClockKind::time_stamp_counter) return __rdtsc();
#elif defined(__aarch64__)
    if (kClock == ClockKind::virtual_counter) {
        std::uint64_t now;
        asm volatile("mrs %0, cntvct_el0" : "=r"(now));
        return now;
    }
#endif
    return static_cast<std::uint64_t>(nanoseconds_of(CLOCK_MONOTONIC));
}

// Returns the clock's frequency in Hz, or 0 if it is unknown.
std::uint64_t ticks_per_second();

// Reads all clocks at the same instant, to within a fraction of a microsecond.
PairFields read_clocks();

}  // namespace paceline::record
