#include "record/clock.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <string_view>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace paceline::record {
namespace {

constexpr int kReadings = 5;

#if defined(__x86_64__)
// Returns true if the kernel uses the counter as its own clock source, which it does only if the counters of all cores
// agree.
bool kernel_trusts_counter() {
    const int fd = open("/sys/devices/system/clocksource/clocksource0/current_clocksource", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return true;
    char text[64];
    const ssize_t n = read(fd, text, sizeof text);
    close(fd);
    const std::string_view source(text, n > 0 ? static_cast<std::size_t>(n) : 0);
    return source.starts_with("tsc") || source.starts_with("kvm-clock") || source.starts_with("hyperv");
}

// Returns true if the counter's speed does not depend on the core's frequency and sleep states.
bool is_invariant() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(0x80000007, &a, &b, &c, &d) != 0 && (d & 1U << 8) != 0;
}
#endif

}  // namespace

ClockKind detect_clock() {
#if defined(__x86_64__)
    if (is_invariant() && kernel_trusts_counter()) return ClockKind::time_stamp_counter;
#elif defined(__aarch64__)
    return ClockKind::virtual_counter;
#endif
    return ClockKind::monotonic;
}

std::uint64_t ticks_per_second() {
    if (kClock == ClockKind::monotonic) return 1'000'000'000;
#if defined(__aarch64__)
    std::uint64_t frequency;
    asm volatile("mrs %0, cntfrq_el0" : "=r"(frequency));
    return frequency;
#else
    return 0;
#endif
}

PairFields read_clocks() {
    PairFields best{};
    std::uint64_t narrowest = ~std::uint64_t{0};
    for (int i = 0; i < kReadings; ++i) {
        const std::uint64_t before = ticks();
        const std::int64_t monotonic_ns = nanoseconds_of(CLOCK_MONOTONIC);
        const std::uint64_t after = ticks();
        const std::int64_t realtime_ns = nanoseconds_of(CLOCK_REALTIME);
        if (after - before >= narrowest) continue;
        narrowest = after - before;
        best = {before + (after - before) / 2, monotonic_ns, realtime_ns};
    }
    return best;
}

}  // namespace paceline::record
