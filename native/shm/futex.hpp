// Functions that sleep on a 32-bit word in shared memory and wake the sleepers.
#pragma once

#include <atomic>
#include <cstdint>

namespace paceline::shm {

static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

// Sleeps while `word` equals `expected`, for at most `timeout_ns`; may wake up spuriously.
void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected, std::int64_t timeout_ns);

void futex_wake_all(const std::atomic<std::uint32_t>& word);

inline void cpu_relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#endif
}

}  // namespace paceline::shm
