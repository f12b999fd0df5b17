// Measures the connections of a group, about once a second while it is used, and writes what it finds into the
// recording, where it outlives the process.
//
// No thread wakes up for it: the threads that run calls and messages ask when they begin one, and in every turn of
// waiting. What nobody uses does not change.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>
#include <vector>

#include "record/recorder.hpp"

namespace paceline::link {

// Adds what the kernel knows of a connection to what is known of its link: bytes and segments are summed up, and of
// the times the longest counts, but the shortest of the shortest round trips. False if it is no TCP connection.
bool add_connection(int socket, record::LinkFields& to);

class LinkMeter {
  public:
    using Clock = std::chrono::steady_clock;

    LinkMeter() = default;
    LinkMeter(const LinkMeter&) = delete;
    LinkMeter& operator=(const LinkMeter&) = delete;
    ~LinkMeter() { close(); }

    // Adds a link; `peer` is the other rank's number in the default group. No call may run yet.
    void watch(int peer, std::vector<int> sockets);
    // Measures for the last time; the sockets must still be open. Idempotent.
    void close();
    // The group's serial in the recording.
    void record_as(std::uint32_t group) { group_.store(group, std::memory_order_relaxed); }

    // Measures if it is time to. Any thread may ask; while one measures, the others go on.
    void measure_if_due(Clock::time_point now) {
        if (now.time_since_epoch().count() >= due_.load(std::memory_order_relaxed)) measure(now);
    }

  private:
    struct Link {
        int peer;
        std::vector<int> sockets;
        record::WrittenLink written;
    };

    void measure(Clock::time_point now);

    std::vector<Link> links_;
    std::atomic<std::uint32_t> group_{0};
    std::atomic<Clock::rep> due_{std::numeric_limits<Clock::rep>::max()};
    std::atomic_flag measuring_;
};

}  // namespace paceline::link
