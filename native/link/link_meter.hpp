// Measures a group's connections about once per second while the group is in use, and writes the measurements to the
// recording, which outlives the process.
//
// The meter has no thread of its own. Threads that run calls and messages invoke it at the beginning of each call and
// in each iteration of a wait loop, so the measurements of an idle group do not change.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>
#include <vector>

#include "record/recorder.hpp"

namespace paceline::link {

// Adds the kernel's statistics for one connection to those for its link: sums bytes and segments, and keeps the minimum
// of the shortest round trips and the maximum of all other times. Returns false if the socket is not a TCP connection.
bool add_connection(int socket, record::LinkFields& to);

class LinkMeter {
  public:
    using Clock = std::chrono::steady_clock;

    LinkMeter() = default;
    LinkMeter(const LinkMeter&) = delete;
    LinkMeter& operator=(const LinkMeter&) = delete;
    ~LinkMeter() { close(); }

    // Adds a link to `peer`, a rank in the default group. Must be called before the group's first call.
    void watch(int peer, std::vector<int> sockets);
    // Performs the last measurement. The sockets must still be open. Idempotent.
    void close();
    // Sets the group's serial number in the recording.
    void record_as(std::uint32_t group) { group_.store(group, std::memory_order_relaxed); }

    // Performs a measurement if one is due. Thread-safe; returns immediately while another thread is measuring.
    void measure_if_due(Clock::time_point now) {
        if (now.time_since_epoch().count() >= due_.load(std::memory_order_relaxed)) measure(now);
    }

  private:
    struct Link {
        int peer;
        std::vector<int> sockets;
        record::LinkEntryHandle handle;
    };

    void measure(Clock::time_point now);

    std::vector<Link> links_;
    std::atomic<std::uint32_t> group_{0};
    std::atomic<Clock::rep> due_{std::numeric_limits<Clock::rep>::max()};
    std::atomic_flag measuring_;
};

}  // namespace paceline::link
