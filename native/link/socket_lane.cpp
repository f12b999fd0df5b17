#include "link/socket_lane.hpp"

#include <fcntl.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace paceline::link {
namespace {

// Keepalive settings. A live machine's kernel answers a probe within one round trip, even if the process is stopped or
// busy.
constexpr int kIdleS = 2;
constexpr int kProbeS = 1;
constexpr int kProbes = 6;
constexpr std::uint32_t kSilenceMs = 8000;
constexpr int kMaxDrained = 4096;  // maximum number of reads when draining a socket
// Limits the unsent data in the kernel's buffer, because data that does not fit in the cache must be read from memory
// again.
constexpr int kMaxUnsent = 128 << 10;
// The states of a TCP connection whose FIN the peer has not acknowledged; <linux/tcp.h> does not define them.
constexpr int kFinWait1 = 4;
constexpr int kLastAck = 9;
constexpr int kClosing = 11;

std::size_t fill(std::array<iovec, kMaxRanges + 1>& vectors, std::span<const ByteRange> ranges, std::size_t& wanted) {
    const std::size_t n = std::min(ranges.size(), kMaxRanges);
    for (std::size_t i = 0; i < n; ++i) {
        vectors[i] = {ranges[i].data, ranges[i].nbytes};
        wanted += ranges[i].nbytes;
    }
    return n;
}

bool would_block() {
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

}  // namespace

SocketLane::SocketLane(int socket) : socket_(socket), guard_([socket] { ::close(socket); }) {
    fcntl(socket_, F_SETFL, fcntl(socket_, F_GETFL) | O_NONBLOCK);
    const int on = 1;
    // The TCP options fail on Unix sockets, which do not need them.
    setsockopt(socket_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(socket_, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &kMaxUnsent, sizeof kMaxUnsent);
    setsockopt(socket_, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(socket_, IPPROTO_TCP, TCP_KEEPIDLE, &kIdleS, sizeof kIdleS);
    setsockopt(socket_, IPPROTO_TCP, TCP_KEEPINTVL, &kProbeS, sizeof kProbeS);
    setsockopt(socket_, IPPROTO_TCP, TCP_KEEPCNT, &kProbes, sizeof kProbes);
}

SocketLane::~SocketLane() {
    // Drains the socket, because closing it with unread data would cause a reset, which could overtake the last data
    // sent. A peer that continues to send still receives a reset.
    for (int i = 0; i < kMaxDrained && recv(socket_, ahead_.data(), ahead_.size(), MSG_DONTWAIT) > 0; ++i) {
    }
    guard_.close();
}

std::ptrdiff_t SocketLane::write(std::span<const ByteRange> ranges) {
    std::array<iovec, kMaxRanges + 1> vectors;
    std::size_t wanted = 0;
    msghdr message{};
    message.msg_iov = vectors.data();
    message.msg_iovlen = fill(vectors, ranges, wanted);
    const ssize_t sent = sendmsg(socket_, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) return sent;
    return would_block() ? 0 : kClosed;
}

std::ptrdiff_t SocketLane::read(std::span<const ByteRange> ranges) {
    if (ahead_from_ != ahead_to_) {
        std::size_t copied = 0;
        for (const ByteRange& range : ranges) {
            const std::size_t n = std::min(range.nbytes, ahead_to_ - ahead_from_);
            std::memcpy(range.data, ahead_.data() + ahead_from_, n);
            ahead_from_ += n;
            copied += n;
            if (ahead_from_ == ahead_to_) break;
        }
        return static_cast<std::ptrdiff_t>(copied);
    }
    std::array<iovec, kMaxRanges + 1> vectors;
    std::size_t wanted = 0;
    std::size_t count = fill(vectors, ranges, wanted);
    if (wanted < ahead_.size()) vectors[count++] = {ahead_.data(), ahead_.size()};
    msghdr message{};
    message.msg_iov = vectors.data();
    message.msg_iovlen = count;
    const ssize_t got = recvmsg(socket_, &message, MSG_DONTWAIT);
    if (got < 0) return would_block() ? 0 : kClosed;
    if (got == 0) return kClosed;
    const auto taken = std::min(static_cast<std::size_t>(got), wanted);
    ahead_from_ = 0;
    ahead_to_ = static_cast<std::size_t>(got) - taken;
    return static_cast<std::ptrdiff_t>(taken);
}

bool SocketLane::silent() const {
    tcp_info info{};
    socklen_t size = sizeof info;
    if (getsockopt(socket_, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return false;
    const bool owes_an_answer = info.tcpi_unacked != 0 || info.tcpi_probes != 0;
    return owes_an_answer && std::min(info.tcpi_last_ack_recv, info.tcpi_last_data_recv) > kSilenceMs;
}

void SocketLane::finish() {
    shutdown(socket_, SHUT_WR);
}

bool SocketLane::delivered() const {
    tcp_info info{};
    socklen_t size = sizeof info;
    if (getsockopt(socket_, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return true;  // a Unix socket delivers at once
    return info.tcpi_state != kFinWait1 && info.tcpi_state != kLastAck && info.tcpi_state != kClosing;
}

}  // namespace paceline::link
