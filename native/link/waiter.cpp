#include "link/waiter.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>

namespace paceline::link {

Waiter::Waiter() : epoll_(epoll_create1(EPOLL_CLOEXEC)), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    watch(wake_);
}

Waiter::~Waiter() {
    ::close(epoll_);
    ::close(wake_);
}

void Waiter::watch(int descriptor) {
    epoll_event event{};
    event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
    epoll_ctl(epoll_, EPOLL_CTL_ADD, descriptor, &event);
}

void Waiter::sleep(int timeout_ms) {
    std::array<epoll_event, 16> events;
    epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), timeout_ms);
}

void Waiter::wake() {
    const std::uint64_t one = 1;
    static_cast<void>(!write(wake_, &one, sizeof one));
}

}  // namespace paceline::link
