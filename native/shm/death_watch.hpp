// Notices, on a thread of its own, which ranks of the directory have come to their end.
//
// The thread sleeps on the directory's count of changes and on the pulses of the kMostWatchers ranks behind it in the
// circle. That needs futex_waitv; before Linux 5.16 it looks at all pulses in every turn instead. It also does so every
// few turns while a rank has not come yet, and now and then on larger hosts, since all watchers of a rank may die with
// it. There it rests for some turns after each change: ranks that leave would wake all others once for each of them. A
// rank that could not hold a pulse (emulators of other processors lack robust futexes) lives as long as its socket
// listens.
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
    // Whether this kernel can wait for many words at once.
    static bool is_possible();

    // `changed` is called on that thread, after every change in which ranks are gone.
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
