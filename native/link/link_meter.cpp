#include "link/link_meter.hpp"

#include <linux/tcp.h>  // conflicts with <netinet/tcp.h>, which lacks the newer fields of tcp_info
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <utility>

namespace paceline::link {
namespace {

constexpr auto kEvery = std::chrono::seconds(1);
constexpr std::uint32_t kNoRoundTrip = ~std::uint32_t{0};  // the kernel's value if there is no measurement

}  // namespace

bool add_connection(int socket, record::LinkFields& to) {
    tcp_info info{};  // older kernels fill only the first fields
    socklen_t size = sizeof info;
    if (getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return false;
    to.sent_nbytes += info.tcpi_bytes_acked;
    to.received_nbytes += info.tcpi_bytes_received;
    to.segments += info.tcpi_data_segs_out;
    to.nbytes_per_s += info.tcpi_delivery_rate;
    to.busy_us = std::max<std::uint64_t>(to.busy_us, info.tcpi_busy_time);
    to.held_us = std::max<std::uint64_t>(to.held_us, info.tcpi_rwnd_limited);
    to.round_trip_us = std::max<std::uint32_t>(to.round_trip_us, info.tcpi_rtt);
    to.variation_us = std::max<std::uint32_t>(to.variation_us, info.tcpi_rttvar);
    if (info.tcpi_min_rtt != 0 && info.tcpi_min_rtt != kNoRoundTrip) {
        const std::uint32_t least = to.least_round_trip_us;
        to.least_round_trip_us = least == 0 ? info.tcpi_min_rtt : std::min<std::uint32_t>(least, info.tcpi_min_rtt);
    }
    to.retransmits += info.tcpi_total_retrans;
    if (info.tcpi_unacked != 0 || info.tcpi_probes != 0) {
        const std::uint32_t heard_ms = std::min(info.tcpi_last_ack_recv, info.tcpi_last_data_recv);
        to.silent_ms = std::max(to.silent_ms, heard_ms);
    }
    ++to.connections;
    return true;
}

void LinkMeter::close() {
    if (links_.empty()) return;
    measure(Clock::now());
    for (Link& link : links_) record::Recorder::close_link(link.handle);
    links_.clear();
}

void LinkMeter::watch(int peer, std::vector<int> sockets) {
    links_.push_back({peer, std::move(sockets), {}});
    due_.store(0, std::memory_order_relaxed);
}

void LinkMeter::measure(Clock::time_point now) {
    record::Recorder* const recorder = record::Recorder::active();
    if (recorder == nullptr || measuring_.test_and_set(std::memory_order_acquire)) return;
    due_.store((now + kEvery).time_since_epoch().count(), std::memory_order_relaxed);
    for (Link& link : links_) {
        record::LinkFields fields;
        fields.group = group_.load(std::memory_order_relaxed);
        fields.peer = link.peer;
        fields.measured = record::ticks();
        for (const int socket : link.sockets) add_connection(socket, fields);
        if (fields.connections == 0) continue;
        if (link.handle)
            record::Recorder::change(link.handle, fields);
        else
            link.handle = recorder->open_link(fields);
    }
    measuring_.clear(std::memory_order_release);
}

}  // namespace paceline::link
