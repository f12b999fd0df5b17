#include "store/client.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace paceline::store {
namespace {

constexpr int kSpins = 50;  // looks at the socket before sleeping on it; each lets the server run
constexpr std::int64_t kSliceMs = 100;

}  // namespace

Client::Client(int fd) : fd_(fd) {
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
}

Client::~Client() {
    close();
}

void Client::close() {
    const std::lock_guard hold(mutex_);
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
}

Client::Result Client::wait_for(short events, std::chrono::steady_clock::time_point deadline,
                                const std::function<bool()>& interrupted) {
    for (;;) {
        const auto left =
            std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count();
        if (left <= 0) return Result::timed_out;
        pollfd watched{fd_, events, 0};
        if (poll(&watched, 1, static_cast<int>(std::min<std::int64_t>(left, kSliceMs))) > 0) return Result::answered;
        if (interrupted()) return Result::interrupted;
    }
}

Client::Result Client::ask(const Message& request, Message& answer, std::chrono::steady_clock::time_point deadline,
                           const std::function<bool()>& interrupted) {
    const std::lock_guard hold(mutex_);
    if (fd_ < 0) return Result::closed;
    const Result result = exchange(request, answer, deadline, interrupted);
    if (result != Result::answered) {
        ::close(fd_);
        fd_ = -1;
    }
    return result;
}

Client::Result Client::exchange(const Message& request, Message& answer, std::chrono::steady_clock::time_point deadline,
                                const std::function<bool()>& interrupted) {
    out_.clear();
    encode(request, out_);
    for (std::size_t sent = 0; sent < out_.size();) {
        const ssize_t n = send(fd_, out_.data() + sent, out_.size() - sent, MSG_NOSIGNAL);
        if (n >= 0) {
            sent += static_cast<std::size_t>(n);
        } else if (errno == EAGAIN) {
            if (const Result waited = wait_for(POLLOUT, deadline, interrupted); waited != Result::answered)
                return waited;
        } else if (errno != EINTR) {
            return Result::closed;
        }
    }
    in_.clear();
    int spins = 0;
    for (;;) {
        const ssize_t n = recv(fd_, buffer_.data(), buffer_.size(), 0);
        const int why = errno;
        if (n > 0) {
            in_.append(buffer_.data(), static_cast<std::size_t>(n));
            std::size_t used = 0;
            const Parse parsed = decode(in_, answer, used);
            if (parsed == Parse::complete) return Result::answered;
            if (parsed == Parse::malformed) return Result::closed;
        } else if (n < 0 && why == EAGAIN) {
            if (spins++ < kSpins)
                sched_yield();
            else if (const Result waited = wait_for(POLLIN, deadline, interrupted); waited != Result::answered)
                return waited;
        } else if (n == 0 || why != EINTR) {
            return Result::closed;
        }
    }
}

}  // namespace paceline::store
