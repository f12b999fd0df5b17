// Detects on its own thread which ranks in the host directory have exited.
//
// The thread sleeps on the directory's count of changes and on the pulses of the next kMostWatchers ranks in the
// circle. This needs futex_waitv; before Linux 5.16 the thread checks all pulses in every turn instead. It also checks
// all pulses every few turns while a rank has not arrived yet, and occasionally on hosts with more ranks, where all
// watchers of a rank may die together with it. On those hosts it pauses for some turns after each change: without the
// pause, every departing rank would wake all others. A rank without a pulse (processor emulators lack robust futexes)
// counts as live while its socket listens.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

#include "shm/host_directory.hpp"

namespace paceline::shm {

class DeathWatch {
  public:
    // Returns true if this kernel supports futex_waitv.
    static bool is_possible();

    // Calls `changed` on the thread whenever a rank has died or left.
    DeathWatch(std::shared_ptr<HostDirectory> directory, int rank, std::function<void()> changed,
               bool waits_for_many = is_possible());
    DeathWatch(const DeathWatch&) = delete;
    DeathWatch& operator=(const DeathWatch&) = delete;
    ~DeathWatch();

    // Idempotent.
    void close();

  private:
    struct Look;

    void run();
    Look look() const;
    std::chrono::milliseconds seldom_turn() const;

    std::shared_ptr<HostDirectory> directory_;
    int rank_;
    std::function<void()> changed_;
    bool waits_for_many_;
    std::atomic<std::uint32_t> closing_{0};
    std::thread thread_;
};

}  // namespace paceline::shm
