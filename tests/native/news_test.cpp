// Tests how news wakes the sleepers.
#include "shm/news.hpp"

#include <thread>

#include "check.hpp"

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

}  // namespace

int main() {
    news_wakes_a_sleeper_before_its_timeout();
    a_sleeper_that_has_heard_the_news_is_not_woken_again();
}
