// Tests how a change wakes the sleepers.
#include "shm/change_notifier.hpp"

#include <thread>

#include "check.hpp"

namespace {

using namespace paceline::shm;

constexpr std::int64_t kForEverNs = std::int64_t{600} * 1'000'000'000;  // longer than any test may take

void a_change_ends_a_sleep_before_its_timeout() {
    ChangeNotifier notifier;
    std::atomic<std::uint32_t> word{0};
    std::thread sleeper([&] { ChangeNotifier::Sleeper(notifier).sleep(word, 0, kForEverNs); });
    notifier.notify();
    // The sleeper notices the change whether it has not yet begun to sleep, is about to, or is asleep.
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
    sleeper.sleep(word, 0, kForEverNs);  // returns at once, since there was a change
    std::thread waker([&] {
        while (word == 0) {
        }
        futex_wake_all(word);
    });
    CHECK(!notifier.repeat_wakeups());
    word = 1;
    sleeper.sleep(word, 0, kForEverNs);  // returns since the word has changed
    waker.join();
}

}  // namespace

int main() {
    a_change_ends_a_sleep_before_its_timeout();
    a_sleeper_that_has_seen_the_change_is_not_woken_again();
}
