// Detects, on its own thread, which ranks of the directory have ended.
//
// The thread sleeps on the directory's count of changes and on the pulses of the next kMostWatchers ranks in the
// circle. This needs futex_waitv; before Linux 5.16 the thread checks all pulses in every turn instead. It also does so
// every few turns while a rank has not arrived yet, and from time to time on larger hosts, since all watchers of a rank
// may die with it. On larger hosts it pauses for some turns after each change, since ranks that leave would otherwise
// wake all others once for each of them. A rank that could not hold a pulse (emulators of other processors lack robust
// futexes) counts as live as long as its socket listens.
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
    // Returns whether this kernel can wait for many words at once.
    static bool is_possible();

    // `changed` is called on the thread after every change in which ranks have died or left.
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
