#include "store/client.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <span>

namespace paceline::store {
namespace {

constexpr int kMaxSpins = 64;
constexpr std::uint32_t kProbeEvery = 32;  // number of requests after which spinning is tried again
constexpr int kProbeSpins = 8;
constexpr std::int64_t kSliceMs = 100;

}  // namespace

Client::Client(tls::Socket socket)
    : socket_(std::move(socket)), spins_(kProbeSpins), buffer_(std::make_unique_for_overwrite<char[]>(kReadBytes)) {
    fcntl(socket_.descriptor, F_SETFL, fcntl(socket_.descriptor, F_GETFL) | O_NONBLOCK);
}

Client::~Client() {
    close();
}

void Client::close() {
    {
        const std::lock_guard lock(close_mutex_);
        closing_ = true;
        if (socket_.descriptor >= 0) shutdown(socket_.descriptor, SHUT_RDWR);
    }
    const std::lock_guard lock(request_mutex_);
    release();
}

void Client::release() {
    const std::lock_guard lock(close_mutex_);
    if (socket_.descriptor >= 0) ::close(socket_.descriptor);
    socket_.descriptor = -1;
}

Client::Result Client::sleep_until(short events, Deadline deadline, const Interrupted& interrupted) {
    for (;;) {
        const auto left =
            std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count();
        if (left <= 0) return Result::timed_out;
        pollfd watched{socket_.descriptor, events, 0};
        if (poll(&watched, 1, static_cast<int>(std::min<std::int64_t>(left, kSliceMs))) > 0) return Result::answered;
        if (interrupted()) return Result::interrupted;
    }
}

Client::Result Client::call(const Message& request, Message& answer, Deadline deadline,
                            const Interrupted& interrupted) {
    const std::lock_guard lock(request_mutex_);
    if (socket_.descriptor < 0) return Result::closed;
    const Result result = exchange(request, answer, deadline, interrupted);
    if (result == Result::answered) return result;
    release();
    return result == Result::lost && closing_ ? Result::closed : result;
}

Client::Result Client::exchange(const Message& request, Message& answer, Deadline deadline,
                                const Interrupted& interrupted) {
    if (goodbye_) return Result::closed;
    encode(request, out_);
    const Result sent = send_all(deadline, interrupted);
    out_.clear();
    if (out_.capacity() > kKeptBytes) out_.shrink_to_fit();
    // After a failed send, the server's goodbye may still be unread.
    if (sent != Result::answered && sent != Result::lost) return sent;
    Result received = receive(answer, deadline, interrupted);
    if (received == Result::answered && static_cast<Status>(answer.code) == Status::closing) received = Result::closed;
    if (received == Result::answered && sent == Result::lost) received = Result::lost;
    in_.clear();
    if (in_.capacity() > kKeptBytes) in_.shrink_to_fit();
    return received;
}

Client::Result Client::send_all(Deadline deadline, const Interrupted& interrupted) {
    for (std::size_t sent = 0; sent < out_.size();) {
        const ssize_t n = socket_.send(out_.data() + sent, out_.size() - sent);
        if (n >= 0) {
            sent += static_cast<std::size_t>(n);
        } else if (errno == EAGAIN) {
            if (const Result waited = sleep_until(POLLOUT, deadline, interrupted); waited != Result::answered)
                return waited;
        } else if (errno != EINTR) {
            return Result::lost;
        }
    }
    return Result::answered;
}

// Returns true if no data follows the answer except the server's goodbye.
bool Client::ends_at(std::size_t used) {
    if (used == in_.size()) return true;
    Message rest;
    std::size_t of_rest = 0;
    goodbye_ = decode(std::span<const char>(in_).subspan(used), rest, of_rest) == ParseResult::complete &&
               used + of_rest == in_.size() && static_cast<Status>(rest.code) == Status::closing;
    return goodbye_;
}

// Spinning avoids the latency of waking a thread but competes with the server if there are only a few cores. The
// number of spins therefore adapts to the success of recent spins.
Client::Result Client::receive(Message& answer, Deadline deadline, const Interrupted& interrupted) {
    int polls = std::max(spins_, ++asked_ % kProbeEvery == 0 ? kProbeSpins : 0);
    const bool spinning = polls > 0;
    for (;;) {
        const ssize_t n = socket_.recv(buffer_.get(), kReadBytes);
        if (n > 0) {
            in_.append(buffer_.get(), static_cast<std::size_t>(n));
            std::size_t used = 0;
            const ParseResult parsed = decode(in_, answer, used);
            if (parsed == ParseResult::malformed || (parsed == ParseResult::complete && !ends_at(used)))
                return Result::lost;
            if (parsed == ParseResult::complete) break;
        } else if (n == 0) {
            return Result::lost;
        } else if (errno == EAGAIN) {
            if (polls-- > 0)
                sched_yield();
            else if (const Result waited = sleep_until(POLLIN, deadline, interrupted); waited != Result::answered)
                return waited;
        } else if (errno != EINTR) {
            return Result::lost;
        }
    }
    if (spinning) spins_ = polls >= 0 ? std::min(kMaxSpins, spins_ + 4) : spins_ / 2;
    return Result::answered;
}

}  // namespace paceline::store
