#include "shm/region_exchange.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "call/poll_interval.hpp"

namespace paceline::shm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kMaxPendingConnections = 64;
constexpr std::chrono::seconds kSilence{5};  // time after which a connection without a request is closed
constexpr int kPollMs = 1000;                // milliseconds between checks for silent connections
constexpr int kQueued = 1024;                // the listen backlog
constexpr std::chrono::milliseconds kPause{2};

struct ReplyHead {
    std::uint64_t size = 0;  // size of the region; 0: the region does not exist
    PagePolicy pages{};
    std::int32_t failure = 0;  // an errno if the region does not exist, or 0 if it may exist later
};

// A descriptor that is closed at the end of its scope.
class Descriptor {
  public:
    explicit Descriptor(int fd) : fd_(fd) {}
    Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Descriptor& operator=(Descriptor&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    ~Descriptor() {
        if (fd_ >= 0) ::close(fd_);
    }
    int get() const { return fd_; }

  private:
    int fd_;
};

// A connection on which no request has arrived yet.
struct PendingConnection {
    Descriptor connection;
    Clock::time_point since;
};

SocketName random_name() {
    std::array<std::uint8_t, 12> random{};
    if (getrandom(random.data(), random.size(), 0) != static_cast<ssize_t>(random.size()))
        throw std::system_error(errno, std::generic_category(), "getrandom");
    SocketName name{"paceline-"};
    std::size_t at = std::strlen(name.data());
    for (const std::uint8_t each : random)
        for (const int digit : {each >> 4, each & 15}) name[at++] = "0123456789abcdef"[digit];
    return name;
}

struct Address {
    explicit Address(const SocketName& name) {
        const std::size_t length = strnlen(name.data(), name.size());
        at.sun_family = AF_UNIX;
        std::memcpy(at.sun_path + 1, name.data(), length);
        nbytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
    }
    const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&at); }

    sockaddr_un at{};
    socklen_t nbytes;
};

int bound_socket(int type, const SocketName& name) {
    const int fd = socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    const Address address(name);
    if (fd >= 0 && bind(fd, address.get(), address.nbytes) == 0) return fd;
    const int error = errno;
    if (fd >= 0) ::close(fd);
    throw std::system_error(error, std::generic_category(), "a Unix socket");
}

bool is_same_user(int connection) {
    ucred who{};
    socklen_t nbytes = sizeof who;
    return getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &who, &nbytes) == 0 && who.uid == getuid();
}

bool equal(const HostDirectory::Key& a, const HostDirectory::Key& b) {
    unsigned difference = 0;
    for (std::size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned>(a[i] ^ b[i]);
    return difference == 0;
}

// Reads a reply that is ready. `failure` is ECONNRESET if the other end closed the connection without a reply.
RegionReply read_reply(int connection) {
    ReplyHead head;
    iovec data{&head, sizeof head};
    msghdr header{};
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    header.msg_control = control;
    header.msg_controllen = sizeof control;
    const ssize_t got = recvmsg(connection, &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    int fd = -1;
    if (const cmsghdr* ancillary = got > 0 ? CMSG_FIRSTHDR(&header) : nullptr;
        ancillary != nullptr && ancillary->cmsg_type == SCM_RIGHTS)
        std::memcpy(&fd, CMSG_DATA(ancillary), sizeof fd);
    if (got != static_cast<ssize_t>(sizeof head)) return {nullptr, ECONNRESET};
    if (head.size == 0) return {nullptr, head.failure};
    if (fd < 0) return {nullptr, EMFILE};  // the kernel drops a descriptor if this process has no free one
    auto segment = Segment::adopt(fd, head.size, head.pages);
    return segment ? RegionReply{std::move(segment), 0} : RegionReply{nullptr, ENOMEM};
}

// Waits for data for at most kPollInterval; returns true if there is data to read.
bool has_arrived(int connection) {
    pollfd watched{connection, POLLIN, 0};
    return poll(&watched, 1, static_cast<int>(kPollInterval.count())) > 0;
}

// Handles a request on a connection; returns true if the connection can be closed.
bool handle(int connection, const HostDirectory::Key& key, const RegionExchange::RequestHandler& handler) {
    RegionRequest request{};
    const ssize_t got = recv(connection, &request, sizeof request, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (got != static_cast<ssize_t>(sizeof request) || !equal(request.key, key)) return true;
    handler(request, connection);
    return true;
}

}  // namespace

RegionExchange::RegionExchange() : listener_name_(random_name()), doorbell_name_(random_name()) {
    try {
        listener_ = bound_socket(SOCK_STREAM, listener_name_);
        doorbell_ = bound_socket(SOCK_DGRAM, doorbell_name_);
        ring_socket_ = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        stop_ = eventfd(0, EFD_CLOEXEC);
        if (ring_socket_ < 0 || stop_ < 0 || listen(listener_, kQueued) != 0)
            throw std::system_error(errno, std::generic_category(), "the sockets of a rank");
    } catch (...) {
        close();
        throw;
    }
}

RegionExchange::~RegionExchange() {
    close();
}

void RegionExchange::close_listener() {
    if (listener_ >= 0) ::close(listener_);
    listener_ = -1;
}

void RegionExchange::close() {
    close_listener();
    for (const int fd : {doorbell_, ring_socket_, stop_})
        if (fd >= 0) ::close(fd);
}

void RegionExchange::ring(const SocketName& name) const {
    const Address address(name);
    const char nothing = 0;
    static_cast<void>(sendto(ring_socket_, &nothing, 1, MSG_DONTWAIT | MSG_NOSIGNAL, address.get(), address.nbytes));
}

void RegionExchange::stop() const {
    const std::uint64_t one = 1;
    while (write(stop_, &one, sizeof one) < 0 && errno == EINTR) {
    }
}

void RegionExchange::serve(const HostDirectory::Key& key, const RequestHandler& handler) const {
    std::vector<PendingConnection> pending;
    for (;;) {
        std::vector<pollfd> watched{{stop_, POLLIN, 0}, {listener_, POLLIN, 0}};
        for (const PendingConnection& each : pending) watched.push_back({each.connection.get(), POLLIN, 0});
        if (poll(watched.data(), watched.size(), pending.empty() ? -1 : kPollMs) < 0) continue;
        if (watched[0].revents != 0) return;
        std::vector<PendingConnection> remaining;
        for (std::size_t i = 0; i < pending.size(); ++i) {
            const bool is_done = watched[i + 2].revents != 0 ? handle(pending[i].connection.get(), key, handler)
                                                             : Clock::now() - pending[i].since > kSilence;
            if (!is_done) remaining.push_back(std::move(pending[i]));
        }
        pending = std::move(remaining);
        if (watched[1].revents == 0) continue;
        Descriptor connection(accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
        if (connection.get() < 0) {
            std::this_thread::sleep_for(kPause);  // out of descriptors; the other end waits or tries again
            continue;
        }
        if (!is_same_user(connection.get()) || handle(connection.get(), key, handler)) continue;
        if (pending.size() >= kMaxPendingConnections) pending.erase(pending.begin());
        pending.push_back({std::move(connection), Clock::now()});
    }
}

void RegionExchange::reply(int connection, const Segment* segment, int failure) {
    ReplyHead head;
    head.failure = failure;
    if (segment != nullptr) head = {segment->size(), segment->pages(), 0};
    iovec data{&head, sizeof head};
    msghdr header{};
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (segment != nullptr) {
        header.msg_control = control;
        header.msg_controllen = sizeof control;
        cmsghdr* ancillary = CMSG_FIRSTHDR(&header);
        ancillary->cmsg_level = SOL_SOCKET;
        ancillary->cmsg_type = SCM_RIGHTS;
        ancillary->cmsg_len = CMSG_LEN(sizeof(int));
        const int fd = segment->fd();
        std::memcpy(CMSG_DATA(ancillary), &fd, sizeof fd);
    }
    // Errors are ignored, because the other rank has either exited or will try again (too many descriptors were in
    // flight).
    static_cast<void>(sendmsg(connection, &header, MSG_NOSIGNAL | MSG_DONTWAIT));
}

RegionReply RegionExchange::request_region(const SocketName& listener, const RegionRequest& request,
                                           Clock::time_point deadline, const std::function<bool()>& is_canceled) {
    const auto is_over = [&] { return Clock::now() >= deadline || is_canceled(); };
    const Address address(listener);
    do {
        const Descriptor connection(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
        if (connection.get() < 0) return {nullptr, errno};
        if (connect(connection.get(), address.get(), address.nbytes) != 0) {
            if (errno != EAGAIN) return {nullptr, ETIMEDOUT};  // no process is listening anymore
            std::this_thread::sleep_for(kPause);               // the backlog is full
            continue;
        }
        if (!is_same_user(connection.get())) return {nullptr, ETIMEDOUT};
        if (send(connection.get(), &request, sizeof request, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof request))
            continue;
        while (!has_arrived(connection.get()))
            if (is_over()) return {nullptr, ETIMEDOUT};
        if (RegionReply received = read_reply(connection.get()); received.failure != ECONNRESET) return received;
        std::this_thread::sleep_for(kPause);
    } while (!is_over());
    return {nullptr, ETIMEDOUT};
}

bool RegionExchange::is_open(const SocketName& listener) {
    const Descriptor connection(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const Address address(listener);
    return connect(connection.get(), address.get(), address.nbytes) == 0 || errno != ECONNREFUSED;
}

void RegionExchange::notify(const SocketName& listener, const RegionRequest& request) {
    const Descriptor connection(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const Address address(listener);
    if (connection.get() < 0 || connect(connection.get(), address.get(), address.nbytes) != 0) return;
    static_cast<void>(send(connection.get(), &request, sizeof request, MSG_NOSIGNAL));
}

}  // namespace paceline::shm
