#include "store/server.hpp"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace paceline::store {
namespace {

constexpr int kEvents = 64;
constexpr int kPollsBeforeSleep = 50;  // requests often arrive in quick succession
constexpr std::int64_t kMaxWaitMs = std::int64_t{1} << 40;
constexpr int kPauseMs = 100;  // pause before accepting again after running out of descriptors
constexpr auto kNoDeadline = std::chrono::steady_clock::time_point::max();

[[noreturn]] void fail(const char* what) {
    throw std::system_error(errno, std::generic_category(), what);
}

void watch(int epoll, int operation, int fd, std::uint32_t events) {
    epoll_event event{};
    event.events = events;
    event.data.fd = fd;
    epoll_ctl(epoll, operation, fd, &event);
}

// Closes a connection cleanly: sends the `unsent` bytes and a goodbye, from which the client infers that this process
// has not died. Does not wait for clients that do not read.
void send_goodbye(const tls::Socket& socket, std::string unsent = {}) {
    encode({static_cast<std::uint8_t>(Status::closing), 0, {}}, unsent);
    for (std::size_t sent = 0; sent < unsent.size();) {
        const ssize_t n = socket.send(unsent.data() + sent, unsent.size() - sent);
        if (n <= 0) break;
        sent += static_cast<std::size_t>(n);
    }
    ::close(socket.descriptor);
}

void empty(std::string& buffer) {
    buffer.clear();
    if (buffer.capacity() > kKeptBytes) buffer.shrink_to_fit();
}

}  // namespace

Server::Server(int listener) : listener_(listener), buffer_(std::make_unique_for_overwrite<char[]>(kReadBytes)) {
    epoll_ = epoll_create1(EPOLL_CLOEXEC);
    if (epoll_ < 0) fail("epoll_create1");
    wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_ < 0) {
        const int why = errno;
        ::close(epoll_);
        errno = why;
        fail("eventfd");
    }
    watch(epoll_, EPOLL_CTL_ADD, wake_, EPOLLIN);
    if (listener_ >= 0) {
        rlimit descriptors{};
        getrlimit(RLIMIT_NOFILE, &descriptors);
        max_connections_ = descriptors.rlim_cur / 2;  // the other half is left for the rest of the process
        fcntl(listener_, F_SETFL, fcntl(listener_, F_GETFL) | O_NONBLOCK);
        watch(epoll_, EPOLL_CTL_ADD, listener_, EPOLLIN);
    }
    try {
        thread_ = std::thread([this] { serve(); });
    } catch (...) {
        ::close(epoll_);
        ::close(wake_);
        throw;
    }
}

Server::~Server() {
    close();
    ::close(epoll_);
    ::close(wake_);
}

void Server::adopt(tls::Socket socket) {
    fcntl(socket.descriptor, F_SETFL, fcntl(socket.descriptor, F_GETFL) | O_NONBLOCK);
    {
        const std::lock_guard lock(mutex_);
        if (closing_) {
            send_goodbye(socket);
            return;
        }
        new_sockets_.push_back(std::move(socket));
    }
    eventfd_write(wake_, 1);
}

void Server::close() {
    {
        const std::lock_guard lock(mutex_);
        closing_ = true;
    }
    eventfd_write(wake_, 1);
    const std::lock_guard lock(join_mutex_);
    if (thread_.joinable()) thread_.join();
}

void Server::serve() {
    pthread_setname_np(pthread_self(), "paceline-store");
    epoll_event events[kEvents];
    int polls = 0;
    for (bool open = true; open;) {
        int n = 0;
        for (; polls > 0 && n == 0; --polls) {
            n = epoll_wait(epoll_, events, kEvents, 0);
            if (n == 0) sched_yield();
        }
        if (n == 0) n = epoll_wait(epoll_, events, kEvents, next_timeout_ms());
        polls = n > 0 ? kPollsBeforeSleep : 0;
        if (std::exchange(is_paused_, false)) watch(epoll_, EPOLL_CTL_MOD, listener_, EPOLLIN);
        for (int i = 0; i < n; ++i) {
            const int fd = events[i].data.fd;
            if (fd == wake_) {
                adopt_new();
                const std::lock_guard lock(mutex_);
                open = !closing_;
                continue;
            }
            if (fd == listener_) {
                accept_new();
                continue;
            }
            const auto found = connections_.find(fd);
            if (found == connections_.end()) continue;
            bool alive = true;
            if (events[i].events & EPOLLOUT) alive = handle_requests(found->second);
            if (alive && (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR))) alive = receive(found->second);
            if (!alive) drop(fd);
            while (!changed_.empty()) send_answers(parked_requests_.wake(table_, changed_));
        }
        send_answers(parked_requests_.expire(std::chrono::steady_clock::now(), table_));
        while (!changed_.empty()) send_answers(parked_requests_.wake(table_, changed_));
    }
    if (listener_ >= 0) ::close(listener_);
    for (const auto& [fd, connection] : connections_) {
        if (connection.torch)
            ::close(fd);  // PyTorch's protocol has no goodbye
        else
            send_goodbye(connection.socket, connection.out.substr(connection.sent));
    }
    const std::lock_guard lock(mutex_);
    for (const tls::Socket& socket : new_sockets_) send_goodbye(socket);
    new_sockets_.clear();
}

void Server::adopt_new() {
    eventfd_t count = 0;
    eventfd_read(wake_, &count);
    std::vector<tls::Socket> fresh;
    {
        const std::lock_guard lock(mutex_);
        fresh.swap(new_sockets_);
    }
    for (tls::Socket& socket : fresh) {
        const int fd = socket.descriptor;
        connections_[fd].socket = std::move(socket);
        watch(epoll_, EPOLL_CTL_ADD, fd, EPOLLIN);
    }
}

void Server::accept_new() {
    while (connections_.size() < max_connections_) {
        const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0 && (errno == EINTR || errno == ECONNABORTED)) continue;
        if (fd < 0 && errno == EAGAIN) return;
        if (fd < 0) break;
        const int on = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
        Connection& connection = connections_[fd];
        connection.socket = fd;
        connection.torch = std::make_unique<TorchReader>();
        watch(epoll_, EPOLL_CTL_ADD, fd, EPOLLIN);
    }
    is_paused_ = true;
    watch(epoll_, EPOLL_CTL_MOD, listener_, 0);
}

// Returns false if the connection is closed.
bool Server::receive(Connection& connection) {
    const ssize_t got = connection.socket.recv(buffer_.get(), kReadBytes);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return true;
    if (got <= 0 || (!connection.torch && parked_requests_.holds(connection.socket.descriptor))) return false;
    connection.in.append(buffer_.get(), static_cast<std::size_t>(got));
    return handle_requests(connection);
}

bool Server::handle_requests(Connection& connection) {
    if (connection.torch) return handle_torch(connection);
    std::size_t done = 0;
    Message request;
    for (;;) {
        if (!flush(connection)) return false;
        if (connection.blocked) {
            connection.in.erase(0, done);
            return true;
        }
        std::size_t used = 0;
        const ParseResult parsed = decode(std::span(connection.in).subspan(done), request, used);
        if (parsed == ParseResult::malformed) return false;
        if (parsed == ParseResult::partial) {
            connection.in.erase(0, done);
            if (connection.in.empty()) empty(connection.in);
            return true;
        }
        done += used;
        if (const auto answer = table_.apply(request, changed_)) {
            encode(*answer, connection.out);
            if (static_cast<Op>(request.code) == Op::last_will &&
                answer->code == static_cast<std::uint8_t>(Status::ok)) {
                if (request.number == 0)
                    connection.wills.insert_or_assign(std::move(request.fields[0]), std::move(request.fields[1]));
                else
                    connection.wills.erase(request.fields[0]);
            }
        } else if (request.number <= 0) {
            encode({static_cast<std::uint8_t>(Status::timed_out), 0, table_.missing(request)}, connection.out);
        } else {
            const auto wait = std::chrono::milliseconds(std::min(request.number, kMaxWaitMs));
            parked_requests_.park(connection.socket.descriptor, std::move(request),
                                  std::chrono::steady_clock::now() + wait, table_);
            const bool alone = done == connection.in.size();
            empty(connection.in);
            return alone;
        }
    }
}

// Handles queries from a PyTorch client. While a query is waiting, the client may only cancel that query.
bool Server::handle_torch(Connection& connection) {
    const int fd = connection.socket.descriptor;
    TorchReader& reader = *connection.torch;
    std::size_t done = 0;
    for (;;) {
        if (!flush(connection) || !has_room(connection)) return false;
        std::size_t used = 0;
        const ParseResult parsed =
            connection.blocked ? ParseResult::partial : reader.read(std::span(connection.in).subspan(done), used);
        if (parsed == ParseResult::malformed) return false;
        if (parsed == ParseResult::partial) {
            connection.in.erase(0, done);
            if (connection.in.empty()) empty(connection.in);
            return true;
        }
        done += used;
        if (!connection.is_valid) {
            connection.is_valid = reader.query() == TorchQuery::validate && reader.request().number == kTorchMagic;
            if (!connection.is_valid) return false;
        } else if (reader.query() == TorchQuery::cancel_wait) {
            parked_requests_.remove(fd);
            encode(TorchWaitReply::canceled, connection.out);
        } else if (parked_requests_.holds(fd) || reader.query() == TorchQuery::validate) {
            return false;
        } else if (reader.query() == TorchQuery::barrier) {
            if (!handle_barrier(connection)) return false;
        } else {
            switch (apply(reader.query(), reader.request(), table_, changed_, connection.out)) {
                case TorchOutcome::answered:
                    break;
                case TorchOutcome::waits:
                    connection.parked = used;
                    parked_requests_.park(fd, std::move(reader.request()), kNoDeadline, table_, true);
                    break;
                case TorchOutcome::refused:
                    return false;
            }
        }
    }
}

// Returns true if the memory used for PyTorch's clients, which are not authenticated, is within the limit.
bool Server::has_room(Connection& connection) {
    if (!parked_requests_.holds(connection.socket.descriptor)) connection.parked = 0;
    const std::size_t held =
        connection.in.capacity() + connection.torch->nbytes() + connection.parked + connection.out.capacity();
    buffered_bytes_ += held - std::exchange(connection.held, held);
    return buffered_bytes_ + table_.nbytes() <= kMaxTorchBytes;
}

// Counts a client that has reached a barrier. All clients except the last wait for a key. When the last client arrives,
// the server creates the key, which wakes the others, and deletes it immediately. Later clients do not wait.
bool Server::handle_barrier(Connection& connection) {
    Message& request = connection.torch->request();
    const std::int64_t wanted = std::exchange(request.number, 1);
    const auto come = table_.apply(request, changed_);
    if (come->code != static_cast<std::uint8_t>(Status::ok)) return false;
    const std::string met = std::string("\0barrier/", 9) + request.fields[0];
    if (come->number < wanted) {
        const Message wait{static_cast<std::uint8_t>(Op::wait), 0, {met}};
        parked_requests_.park(connection.socket.descriptor, wait, kNoDeadline, table_);
        return true;
    }
    encode(TorchWaitReply::over, connection.out);
    std::vector<std::string> changed;
    table_.apply({static_cast<std::uint8_t>(Op::set), 0, {met, ""}}, changed);
    send_answers(parked_requests_.wake(table_, changed));
    table_.apply({static_cast<std::uint8_t>(Op::remove), 0, {met}}, changed_);
    return true;
}

// Sends pending output; returns false if the peer has closed the connection.
bool Server::flush(Connection& connection) {
    const int fd = connection.socket.descriptor;
    while (connection.sent < connection.out.size()) {
        const ssize_t n =
            connection.socket.send(connection.out.data() + connection.sent, connection.out.size() - connection.sent);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) break;
        if (n < 0) return false;
        connection.sent += static_cast<std::size_t>(n);
    }
    const bool blocked = connection.sent < connection.out.size();
    if (!blocked && !connection.out.empty()) {
        empty(connection.out);
        connection.sent = 0;
    }
    if (blocked != connection.blocked) watch(epoll_, EPOLL_CTL_MOD, fd, blocked ? EPOLLOUT : EPOLLIN);
    connection.blocked = blocked;
    return true;
}

void Server::send_answers(const ParkedRequests::Answers& answers) {
    for (const auto& [fd, answer] : answers) {
        Connection& connection = connections_.at(fd);
        if (connection.torch)
            encode(TorchWaitReply::over, connection.out);
        else
            encode(answer, connection.out);
        if (!flush(connection)) drop(fd);
    }
}

void Server::drop(int fd) {
    parked_requests_.remove(fd);
    const std::map<std::string, std::string> wills = std::move(connections_.at(fd).wills);
    buffered_bytes_ -= connections_.at(fd).held;
    connections_.erase(fd);
    ::close(fd);
    for (const auto& [key, value] : wills)
        table_.apply({static_cast<std::uint8_t>(Op::set), 0, {key, value}}, changed_);
}

int Server::next_timeout_ms() const {
    if (is_paused_) return kPauseMs;
    const auto first = parked_requests_.next_deadline();
    if (!first || *first == kNoDeadline) return -1;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(*first - std::chrono::steady_clock::now()).count();
    return static_cast<int>(std::clamp<std::int64_t>(left, 0, 60'000));
}

}  // namespace paceline::store
