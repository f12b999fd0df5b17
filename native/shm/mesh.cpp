#include "shm/mesh.hpp"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

namespace paceline::shm {
namespace {

// How long to wait before waking a thread again that had not fallen asleep yet.
constexpr int kRepeatMs = 1;

}  // namespace

enum class Mesh::Kind : std::uint32_t { region = 1, withdrawal = 2, goodbye = 3, doorbell = 4, pulse = 5, blame = 6 };

struct Mesh::Message {
    Kind kind;
    std::uint32_t reserved;
    RegionId id;
    std::uint64_t size;
};

Mesh::Mesh(int rank, std::vector<int> sockets, std::vector<int> names)
    : rank_(rank),
      sockets_(std::move(sockets)),
      names_(std::move(names)),
      wake_(eventfd(0, EFD_CLOEXEC)),
      doorbell_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      doorbells_(sockets_.size()),
      blamed_by_(sockets_.size()),
      watch_([this](int peer, std::uint32_t note) { pulse_ended(peer, note); }),
      guard_([this] { close_sockets(); }) {
    if (wake_ < 0 || doorbell_ < 0) {
        const int why = errno;
        for (const int fd : {wake_, doorbell_})
            if (fd >= 0) ::close(fd);
        guard_.close();
        throw std::system_error(why, std::generic_category(), "eventfd");
    }
    for (int peer = static_cast<int>(names_.size()); peer < size(); ++peer) names_.push_back(peer);
    for (std::atomic<int>& each : doorbells_) each.store(-1, std::memory_order_relaxed);
    listener_ = std::thread([this] { listen(); });
    for (int peer = 0; peer < size(); ++peer) send(peer, {Kind::doorbell, 0, 0, 0}, doorbell_);
}

Mesh::~Mesh() {
    if (forked_from_member()) {
        listener_.detach();  // the thread does not exist in a forked child
        return;
    }
    close();
    ::close(wake_);
    ::close(doorbell_);
    for (const std::atomic<int>& each : doorbells_)
        if (const int fd = each.load(std::memory_order_relaxed); fd >= 0) ::close(fd);
}

void Mesh::wake_peer(int peer) {
    const int fd = doorbells_[static_cast<std::size_t>(peer)].load(std::memory_order_acquire);
    const std::uint64_t one = 1;
    // Until its descriptor has arrived, the peer wakes when its current turn of sleep ends. If the write fails because
    // the counter is full, the peer has already been woken.
    if (fd >= 0) static_cast<void>(!write(fd, &one, sizeof one));
}

void Mesh::close_sockets() {
    for (int& socket : sockets_) {
        if (socket >= 0) ::close(socket);
        socket = -1;
    }
}

void Mesh::close() {
    {
        const std::lock_guard hold(sending_);
        if (closed_) return;
        closed_ = true;
    }
    for (int peer = 0; peer < size(); ++peer) send(peer, {Kind::goodbye, 0, 0, 0}, -1);
    const std::uint64_t one = 1;
    while (write(wake_, &one, sizeof one) < 0 && errno == EINTR) {
    }
    listener_.join();
    watch_.close();
    {
        const std::lock_guard hold(mutex_);
        regions_.clear();
    }
    const std::lock_guard hold(sending_);
    guard_.close();
}

void Mesh::send(int peer, const Message& message, int fd) {
    iovec data{const_cast<Message*>(&message), sizeof message};
    msghdr header{};
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (fd >= 0) {
        header.msg_control = control;
        header.msg_controllen = sizeof control;
        cmsghdr* ancillary = CMSG_FIRSTHDR(&header);
        ancillary->cmsg_level = SOL_SOCKET;
        ancillary->cmsg_type = SCM_RIGHTS;
        ancillary->cmsg_len = CMSG_LEN(sizeof(int));
        std::memcpy(CMSG_DATA(ancillary), &fd, sizeof fd);
    }
    const std::lock_guard hold(sending_);
    const int socket = sockets_[static_cast<std::size_t>(peer)];
    if (socket < 0) return;
    // A failure means that the peer is gone, which the listener reports.
    while (sendmsg(socket, &header, MSG_NOSIGNAL) < 0 && errno == EINTR) {
    }
}

void Mesh::offer(RegionId id, const Segment& segment, std::uint64_t peers) {
    for (int peer = 0; peer < size(); ++peer)
        if (peers & bit(peer)) send(peer, {Kind::region, 0, id, segment.size()}, segment.fd());
}

void Mesh::blame(const Cause& cause) {
    if (blamed_.exchange(cause.pack(), std::memory_order_acq_rel) == cause.pack()) return;
    if (Pulse* const pulse = shown_.load(std::memory_order_acquire)) pulse->set_note(cause.pack());
    for (int peer = 0; peer < size(); ++peer) send(peer, {Kind::blame, 0, cause.pack(), 0}, -1);
}

void Mesh::withdraw(RegionId id, std::uint64_t peers) {
    for (int peer = 0; peer < size(); ++peer)
        if (peers & bit(peer)) send(peer, {Kind::withdrawal, 0, id, 0}, -1);
}

std::shared_ptr<Segment> Mesh::region(int peer, RegionId id, std::chrono::steady_clock::time_point deadline) {
    std::unique_lock hold(mutex_);
    const auto key = std::pair{peer, id};
    const auto there = [&] {
        const std::uint64_t gone =
            liveness_.lost.load(std::memory_order_acquire) | liveness_.left.load(std::memory_order_acquire);
        return regions_.contains(key) || shortages_.contains(key) || withdrawn_.contains(key) ||
               (gone & bit(peer)) != 0;
    };
    arrived_.wait_until(hold, deadline, there);
    withdrawn_.erase(key);
    const auto found = regions_.find(key);
    if (found == regions_.end()) return nullptr;
    found->second.is_taken = true;
    return found->second.segment;
}

int Mesh::shortage(int peer, RegionId id) {
    const std::lock_guard hold(mutex_);
    const auto found = shortages_.find({peer, id});
    return found == shortages_.end() ? 0 : found->second;
}

void Mesh::listen() {
    pthread_setname_np(pthread_self(), "paceline-mesh");
    std::vector<pollfd> watched;
    show_pulse();
    std::vector<int> peers;
    for (int peer = 0; peer < size(); ++peer) {
        if (sockets_[static_cast<std::size_t>(peer)] < 0) continue;
        watched.push_back({sockets_[static_cast<std::size_t>(peer)], POLLIN, 0});
        peers.push_back(peer);
    }
    watched.push_back({wake_, POLLIN, 0});
    for (;;) {
        const int timeout_ms = news_.repeat() ? kRepeatMs : -1;
        if (poll(watched.data(), watched.size(), timeout_ms) < 0) continue;
        if (watched.back().revents != 0) break;
        for (std::size_t i = 0; i < peers.size(); ++i)
            if (watched[i].revents != 0 && !receive(peers[i])) watched[i].fd = -1;
    }
    if (pulse_) pulse_->release();
}

// Arranges for the kernel to tell the peers when this process ends.
void Mesh::show_pulse() {
    if (size() < 2 || !Watch::is_possible()) return;
    pulse_ = Pulse::create(size());
    if (!pulse_ || !pulse_->hold()) return;
    shown_.store(pulse_.get(), std::memory_order_release);
    for (int peer = 0; peer < size(); ++peer)
        send(peer, {Kind::pulse, 0, 0, pulse_->segment().size()}, pulse_->segment().fd());
    pulse_->segment().close_descriptor();
}

void Mesh::pulse_ended(int peer, std::uint32_t note) {
    {
        const std::lock_guard hold(mutex_);
        // The cause may also have been sent over the socket, where it may still be unread.
        if (note != 0) blamed_by_[static_cast<std::size_t>(peer)].store(note, std::memory_order_release);
        if ((liveness_.left.load(std::memory_order_relaxed) & bit(peer)) == 0) tell_of(liveness_.lost, peer);
        arrived_.notify_all();
    }
    while (news_.repeat()) std::this_thread::sleep_for(std::chrono::milliseconds(kRepeatMs));
}

void Mesh::tell_of(std::atomic<std::uint64_t>& mask, int peer) {
    if ((mask.fetch_or(bit(peer), std::memory_order_release) & bit(peer)) != 0) return;
    news_.tell();
    const std::uint64_t one = 1;
    static_cast<void>(!write(doorbell_, &one, sizeof one));
}

// Receives one message from `peer`; returns false when the peer is gone.
bool Mesh::receive(int peer) {
    Message message{};
    iovec data{&message, sizeof message};
    msghdr header{};
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    header.msg_control = control;
    header.msg_controllen = sizeof control;
    ssize_t got = 0;
    do {
        got = recvmsg(sockets_[static_cast<std::size_t>(peer)], &header, MSG_CMSG_CLOEXEC | MSG_WAITALL);
    } while (got < 0 && errno == EINTR);

    int fd = -1;
    if (const cmsghdr* ancillary = CMSG_FIRSTHDR(&header);
        got > 0 && ancillary != nullptr && ancillary->cmsg_type == SCM_RIGHTS)
        std::memcpy(&fd, CMSG_DATA(ancillary), sizeof fd);

    const std::lock_guard hold(mutex_);
    if (got != static_cast<ssize_t>(sizeof message)) {
        if ((liveness_.left.load(std::memory_order_relaxed) & bit(peer)) == 0) tell_of(liveness_.lost, peer);
        arrived_.notify_all();
        return false;
    }
    switch (message.kind) {
        case Kind::region: {
            auto segment = fd >= 0 ? Segment::adopt(fd, message.size) : nullptr;
            // The kernel drops a descriptor if this process has no free slot for it.
            if (segment)
                regions_.insert_or_assign({peer, message.id}, Offered{std::move(segment)});
            else
                shortages_.insert_or_assign({peer, message.id}, fd < 0 ? EMFILE : ENOMEM);
            fd = -1;
            break;
        }
        case Kind::withdrawal:
            if (const auto found = regions_.find({peer, message.id}); found != regions_.end()) {
                if (!found->second.is_taken) withdrawn_.insert(found->first);
                regions_.erase(found);
            }
            shortages_.erase({peer, message.id});
            break;
        case Kind::doorbell:
            // The descriptor is set only once, because another thread may be using it.
            if (auto& place = doorbells_[static_cast<std::size_t>(peer)]; place.load(std::memory_order_relaxed) < 0) {
                place.store(fd, std::memory_order_release);
                fd = -1;
            }
            break;
        case Kind::pulse:
            if (auto segment = fd >= 0 ? Segment::adopt(fd, message.size) : nullptr) {
                segment->close_descriptor();
                watch_.add(peer, std::move(segment), rank_);
            }
            fd = -1;
            break;
        case Kind::blame:
            blamed_by_[static_cast<std::size_t>(peer)].store(static_cast<std::uint32_t>(message.id),
                                                             std::memory_order_release);
            break;
        case Kind::goodbye:
            tell_of(liveness_.left, peer);
            break;
    }
    if (fd >= 0) ::close(fd);
    arrived_.notify_all();
    return true;
}

}  // namespace paceline::shm
