#include "link/waiter.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <system_error>

namespace paceline::link {

Waiter::Waiter() : epoll_(epoll_create1(EPOLL_CLOEXEC)) {
    if (epoll_ < 0) throw std::system_error(errno, std::generic_category(), "epoll_create1");
    wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_ < 0) {
        const int why = errno;
        ::close(epoll_);
        throw std::system_error(why, std::generic_category(), "eventfd");
    }
    watch(wake_);
}

Waiter::~Waiter() {
    ::close(epoll_);
    ::close(wake_);
}

void Waiter::watch(int descriptor) {
    epoll_event event{};
    event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, descriptor, &event) != 0)
        throw std::system_error(errno, std::generic_category(), "epoll_ctl");
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
