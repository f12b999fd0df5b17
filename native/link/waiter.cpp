#include "link/waiter.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>

namespace paceline::link {
namespace {

enum class EventSource : std::uint32_t { data, alert, doorbell };

void add(int epoll, int descriptor, std::uint32_t events, EventSource sign) {
    epoll_event event{};
    event.events = events | EPOLLRDHUP | EPOLLET;
    event.data.u32 = static_cast<std::uint32_t>(sign);
    if (epoll_ctl(epoll, EPOLL_CTL_ADD, descriptor, &event) != 0)
        throw std::system_error(errno, std::generic_category(), "epoll_ctl");
}

}  // namespace

Waiter::Waiter() : epoll_(epoll_create1(EPOLL_CLOEXEC)) {
    if (epoll_ < 0) throw std::system_error(errno, std::generic_category(), "epoll_create1");
    wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_ < 0) {
        const int why = errno;
        ::close(epoll_);
        throw std::system_error(why, std::generic_category(), "eventfd");
    }
    watch_for_alerts(wake_);
}

Waiter::~Waiter() {
    ::close(epoll_);
    ::close(wake_);
}

void Waiter::watch(int descriptor) {
    add(epoll_, descriptor, EPOLLIN | EPOLLOUT, EventSource::data);
}

void Waiter::watch_for_alerts(int descriptor) {
    add(epoll_, descriptor, EPOLLIN, EventSource::alert);
}

// EPOLLOUT ensures that every ring of the doorbell wakes each waiter, even after another waiter has already read the
// datagrams.
void Waiter::watch_doorbell(int descriptor) {
    add(epoll_, descriptor, EPOLLIN | EPOLLOUT, EventSource::doorbell);
    doorbell_ = descriptor;
}

bool Waiter::sleep(std::chrono::milliseconds timeout) {
    std::array<epoll_event, 16> events;
    const int n = epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), static_cast<int>(timeout.count()));
    const auto any = [&](EventSource sign) {
        return std::any_of(events.data(), events.data() + std::max(n, 0), [sign](const epoll_event& event) {
            return event.data.u32 == static_cast<std::uint32_t>(sign);
        });
    };
    // The doorbell must be emptied, because a full socket rejects further datagrams, and later rings would then not
    // wake any thread.
    char nothing = 0;
    if (any(EventSource::doorbell))
        while (recv(doorbell_, &nothing, sizeof nothing, MSG_DONTWAIT) >= 0) {
        }
    return any(EventSource::alert);
}

void Waiter::wake() {
    const std::uint64_t one = 1;
    static_cast<void>(!write(wake_, &one, sizeof one));
}

}  // namespace paceline::link
