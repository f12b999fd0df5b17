#include "store/server.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace paceline::store {
namespace {

constexpr int kEvents = 64;
constexpr int kLooks = 50;  // at the sockets after a request, before sleeping: the next one is often close behind

}  // namespace

Server::Server() : epoll_(epoll_create1(EPOLL_CLOEXEC)), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = wake_;
    epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event);
    thread_ = std::thread([this] { serve(); });
}

Server::~Server() {
    close();
    ::close(epoll_);
    ::close(wake_);
}

void Server::adopt(int fd) {
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    {
        const std::lock_guard hold(mutex_);
        if (closing_) {
            ::close(fd);
            return;
        }
        fresh_.push_back(fd);
    }
    eventfd_write(wake_, 1);
}

void Server::close() {
    {
        const std::lock_guard hold(mutex_);
        closing_ = true;
    }
    eventfd_write(wake_, 1);
    if (thread_.joinable()) thread_.join();
}

void Server::serve() {
    pthread_setname_np(pthread_self(), "paceline-store");
    epoll_event events[kEvents];
    int looks = 0;
    for (;;) {
        int n = 0;
        for (; looks > 0 && n == 0; --looks) {
            n = epoll_wait(epoll_, events, kEvents, 0);
            if (n == 0) sched_yield();
        }
        if (n == 0) n = epoll_wait(epoll_, events, kEvents, next_timeout_ms());
        looks = kLooks;
        for (int i = 0; i < n; ++i) {
            const int fd = events[i].data.fd;
            if (fd == wake_) {
                take_new();
                continue;
            }
            const auto found = connections_.find(fd);
            if (found == connections_.end()) continue;
            if (events[i].events & EPOLLOUT) flush(fd, found->second);
            if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) receive(fd);
        }
        expire_parked();
        const std::lock_guard hold(mutex_);
        if (closing_) break;
    }
    for (const auto& [fd, connection] : connections_) ::close(fd);
    connections_.clear();
    const std::lock_guard hold(mutex_);
    for (const int fd : fresh_) ::close(fd);
    fresh_.clear();
}

void Server::take_new() {
    eventfd_t count = 0;
    eventfd_read(wake_, &count);
    std::vector<int> fresh;
    {
        const std::lock_guard hold(mutex_);
        fresh.swap(fresh_);
    }
    for (const int fd : fresh) {
        connections_.emplace(fd, Connection{});
        epoll_event event{};
        event.events = EPOLLIN;
        event.data.fd = fd;
        epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
    }
}

void Server::receive(int fd) {
    Connection& connection = connections_.at(fd);
    const ssize_t got = recv(fd, buffer_.data(), buffer_.size(), 0);
    const int why = errno;
    if (got < 0 && (why == EAGAIN || why == EINTR)) return;
    if (got <= 0) {
        drop(fd);
        return;
    }
    connection.in.append(buffer_.data(), static_cast<std::size_t>(got));
    handle_requests(fd, connection);
}

void Server::handle_requests(int fd, Connection& connection) {
    Message request;
    while (!connection.parked) {
        std::size_t used = 0;
        const Parse parsed = decode(std::span(connection.in).subspan(connection.consumed), request, used);
        if (parsed == Parse::malformed) {
            drop(fd);
            return;
        }
        if (parsed == Parse::partial) break;
        connection.consumed += used;
        if (auto done = table_.apply(request, changed_)) {
            answer(connection, *done);
        } else if (request.number <= 0) {
            answer(connection, {static_cast<std::uint8_t>(Status::timed_out), 0, table_.missing(request)});
        } else {
            connection.parked = true;
            constexpr std::int64_t kLongest = std::int64_t{1} << 40;
            parked_.push_back(
                {fd, request, Clock::now() + std::chrono::milliseconds(std::min(request.number, kLongest))});
        }
    }
    connection.in.erase(0, connection.consumed);
    connection.consumed = 0;
    flush(fd, connection);
    wake_parked();
}

void Server::answer(Connection& connection, const Message& message) {
    encode(message, connection.out);
}

// Answers what the changed keys were waited for by, in the order of asking, until nothing changes any more.
void Server::wake_parked() {
    while (!changed_.empty()) {
        std::vector<std::string> changed;
        changed.swap(changed_);
        for (auto at = parked_.begin(); at != parked_.end();) {
            const auto wants = [&](const std::string& key) {
                return std::find(at->request.fields.begin(), at->request.fields.end(), key) != at->request.fields.end();
            };
            std::optional<Message> done;
            if (std::any_of(changed.begin(), changed.end(), wants)) done = table_.apply(at->request, changed_);
            if (!done) {
                ++at;
                continue;
            }
            const int fd = at->fd;
            at = parked_.erase(at);
            Connection& connection = connections_.at(fd);
            connection.parked = false;
            answer(connection, *done);
            flush(fd, connection);
        }
    }
}

void Server::expire_parked() {
    const auto now = Clock::now();
    for (auto at = parked_.begin(); at != parked_.end();) {
        if (at->deadline > now) {
            ++at;
            continue;
        }
        const int fd = at->fd;
        const Message late{static_cast<std::uint8_t>(Status::timed_out), 0, table_.missing(at->request)};
        at = parked_.erase(at);
        Connection& connection = connections_.at(fd);
        connection.parked = false;
        answer(connection, late);
        flush(fd, connection);
    }
}

void Server::flush(int fd, Connection& connection) {
    while (connection.sent < connection.out.size()) {
        const ssize_t n =
            send(fd, connection.out.data() + connection.sent, connection.out.size() - connection.sent, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) break;
        if (n < 0) return;  // the peer is gone; its reading side says so and drops it
        connection.sent += static_cast<std::size_t>(n);
    }
    const bool all = connection.sent == connection.out.size();
    if (all) {
        connection.out.clear();
        connection.sent = 0;
    }
    epoll_event event{};
    event.events = all ? EPOLLIN : EPOLLIN | EPOLLOUT;
    event.data.fd = fd;
    if (!all || connection.blocked) epoll_ctl(epoll_, EPOLL_CTL_MOD, fd, &event);
    connection.blocked = !all;
}

void Server::drop(int fd) {
    parked_.remove_if([fd](const Parked& each) { return each.fd == fd; });
    connections_.erase(fd);
    ::close(fd);
}

int Server::next_timeout_ms() const {
    if (parked_.empty()) return -1;
    auto first = parked_.front().deadline;
    for (const Parked& each : parked_) first = std::min(first, each.deadline);
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(first - Clock::now()).count();
    return static_cast<int>(std::clamp<std::int64_t>(left, 0, 60'000));
}

}  // namespace paceline::store
