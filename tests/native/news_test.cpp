// Tests how a death is detected: the kernel marks the rank's pulse, and the news wakes the sleepers.
#include "shm/news.hpp"

#include <unistd.h>

#include <future>
#include <thread>

#include "check.hpp"
#include "shm/pulse.hpp"

namespace {

using namespace paceline::shm;

constexpr std::int64_t kForEverNs = std::int64_t{600} * 1'000'000'000;  // longer than any test may take

void news_wakes_a_sleeper_before_its_timeout() {
    News news;
    std::atomic<std::uint32_t> word{0};
    std::thread sleeper([&] { News::Sleeper(news).sleep(word, 0, kForEverNs); });
    news.tell();
    // The sleeper notices news whether it has not yet begun to sleep, is about to, or is asleep.
    std::atomic<bool> awake{false};
    std::thread teller([&] {
        while (!awake) news.repeat();
    });
    sleeper.join();
    awake = true;
    teller.join();
    CHECK(!news.repeat());
}

void a_sleeper_that_has_heard_the_news_is_not_woken_again() {
    News news;
    std::atomic<std::uint32_t> word{0};
    News::Sleeper sleeper(news);
    news.tell();
    sleeper.sleep(word, 0, kForEverNs);  // returns at once, since there was news
    std::thread waker([&] {
        while (word == 0) {
        }
        futex_wake_all(word);
    });
    CHECK(!news.repeat());
    word = 1;
    sleeper.sleep(word, 0, kForEverNs);  // returns since the word has changed
    waker.join();
}

void the_end_of_a_holder_is_reported_without_a_socket() {
    using Report = std::pair<int, std::uint32_t>;
    std::promise<Report> told;
    Watch watch([&](int peer, std::uint32_t note) { told.set_value({peer, note}); });
    const auto pulse = Pulse::create(3);
    CHECK(pulse != nullptr);
    // A thread stands in for the process, since the kernel does the same for both.
    std::thread([&] { CHECK(pulse->hold()); }).join();
    pulse->set_note(5);
    watch.add(7, Segment::adopt(dup(pulse->segment().fd()), pulse->segment().size()), 2);
    CHECK((told.get_future().get() == Report{7, 5}));
}

void a_holder_that_ends_while_it_is_watched_is_reported() {
    std::promise<int> told;
    std::promise<void> held;
    std::promise<void> seen;
    Watch watch([&](int peer, std::uint32_t) { told.set_value(peer); });
    const auto pulse = Pulse::create(2);
    std::thread holder([&] {
        CHECK(pulse->hold());
        held.set_value();
        seen.get_future().wait();
    });
    held.get_future().wait();
    watch.add(1, Segment::adopt(dup(pulse->segment().fd()), pulse->segment().size()), 0);
    seen.set_value();
    holder.join();
    CHECK(told.get_future().get() == 1);
}

void a_holder_that_releases_its_words_ends_unreported() {
    Watch watch([](int, std::uint32_t) { CHECK(false); });
    const auto pulse = Pulse::create(2);
    std::thread holder([&] {
        CHECK(pulse->hold());
        watch.add(0, Segment::adopt(dup(pulse->segment().fd()), pulse->segment().size()), 1);
        pulse->release();
    });
    holder.join();
    const auto* word = reinterpret_cast<const Held*>(pulse->segment().data()) + 1;
    CHECK((word->holder.load() & FUTEX_OWNER_DIED) == 0);
    watch.close();
}

}  // namespace

int main() {
    news_wakes_a_sleeper_before_its_timeout();
    a_sleeper_that_has_heard_the_news_is_not_woken_again();
    if (!Watch::is_possible()) return 0;
    the_end_of_a_holder_is_reported_without_a_socket();
    a_holder_that_ends_while_it_is_watched_is_reported();
    a_holder_that_releases_its_words_ends_unreported();
}
