// Tests that a change wakes the sleeping threads.
#include "shm/change_notifier.hpp"

#include <thread>

#include "check.hpp"

namespace {

using namespace paceline::shm;

constexpr std::int64_t kForEverNs = std::int64_t{600} * 1'000'000'000;  // longer than the time limit of a test

void a_change_ends_a_sleep_before_its_timeout() {
    ChangeNotifier notifier;
    std::atomic<std::uint32_t> word{0};
    std::thread sleeper([&] { ChangeNotifier::Sleeper(notifier).sleep(word, 0, kForEverNs); });
    notifier.notify();
    // The thread must detect the change before it sleeps, just as it falls asleep, and while it is asleep.
    std::atomic<bool> awake{false};
    std::thread repeater([&] {
        while (!awake) notifier.repeat_wakeups();
    });
    sleeper.join();
    awake = true;
    repeater.join();
    CHECK(!notifier.repeat_wakeups());
}

void a_sleeper_that_has_seen_the_change_is_not_woken_again() {
    ChangeNotifier notifier;
    std::atomic<std::uint32_t> word{0};
    ChangeNotifier::Sleeper sleeper(notifier);
    notifier.notify();
    sleeper.sleep(word, 0, kForEverNs);  // returns at once, because there was a change
    std::thread waker([&] {
        while (word == 0) {
        }
        futex_wake_all(word);
    });
    CHECK(!notifier.repeat_wakeups());
    word = 1;
    sleeper.sleep(word, 0, kForEverNs);  // returns because the word has changed
    waker.join();
}

}  // namespace

int main() {
    a_change_ends_a_sleep_before_its_timeout();
    a_sleeper_that_has_seen_the_change_is_not_woken_again();
}
