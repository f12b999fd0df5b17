// Detects on its own thread which ranks in the host directory have exited.
//
// The thread waits on the directory's change counter and on the futexes of the next kMaxWatchers ranks, in cyclic
// order. This requires futex_waitv; before Linux 5.16 the thread polls all futexes at short intervals instead. It also
// polls all futexes frequently until every rank is present, and occasionally on hosts where a rank has more than
// kMaxWatchers peers, because all watchers of a rank may die together with that rank. On hosts with many ranks it
// pauses after each change; without the pause, every departing rank would wake all others. A rank without futexes
// (processor emulators do not support robust futexes) counts as alive while its socket listens.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

#include "shm/host_directory.hpp"

namespace paceline::shm {

class FailureDetector {
  public:
    // Returns true if this kernel supports futex_waitv.
    static bool is_supported();

    // Calls `changed` on the thread whenever a rank has died or left.
    FailureDetector(std::shared_ptr<HostDirectory> directory, int rank, std::function<void()> changed,
                    bool uses_futex_waitv = is_supported());
    FailureDetector(const FailureDetector&) = delete;
    FailureDetector& operator=(const FailureDetector&) = delete;
    ~FailureDetector();

    // Idempotent.
    void close();

  private:
    struct ScanResult;

    void run();
    ScanResult scan() const;
    std::chrono::milliseconds rare_poll_interval() const;

    std::shared_ptr<HostDirectory> directory_;
    int rank_;
    std::function<void()> changed_;
    bool uses_futex_waitv_;
    std::atomic<std::uint32_t> closing_{0};
    std::thread thread_;
};

}  // namespace paceline::shm
