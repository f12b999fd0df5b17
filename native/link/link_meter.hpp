// Measures the connections of a group, about once a second while the group is used, and writes the measurements into
// the recording, which outlives the process.
//
// No thread wakes up for this: the threads that run calls and messages call the meter when they begin one and in every
// turn of waiting. The measurements of an unused group do not change.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>
#include <vector>

#include "record/recorder.hpp"

namespace paceline::link {

// Adds the kernel's statistics of a connection to those of its link. Bytes and segments are summed; of the times, the
// longest counts, except that the shortest of the shortest round trips counts. Returns false if it is not a TCP
// connection.
bool add_connection(int socket, record::LinkFields& to);

class LinkMeter {
  public:
    using Clock = std::chrono::steady_clock;

    LinkMeter() = default;
    LinkMeter(const LinkMeter&) = delete;
    LinkMeter& operator=(const LinkMeter&) = delete;
    ~LinkMeter() { close(); }

    // Adds a link; `peer` is the other rank in the default group. No call may have been made yet.
    void watch(int peer, std::vector<int> sockets);
    // Measures for the last time; the sockets must still be open. Idempotent.
    void close();
    // Sets the group's serial number in the recording.
    void record_as(std::uint32_t group) { group_.store(group, std::memory_order_relaxed); }

    // Measures if a measurement is due. Any thread may call this; while one thread measures, the others continue.
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
