// Tests the order of asynchronous calls and the thread that runs them, both when the thread busy-waits and when it
// sleeps.
#include "call/call_queue.hpp"

#include <chrono>
#include <thread>
#include <vector>

#include "check.hpp"

namespace {

using namespace paceline;
using namespace std::chrono_literals;

constexpr std::int64_t kHung = 60'000'000'000;  // a limit that a test reaches only if it hangs

// A group of one rank that records the `count` of each call.
class SingleRankCollectives final : public Collectives {
  public:
    SingleRankCollectives(std::vector<std::uint64_t>& ran, bool has_spare_core)
        : ran_(ran), has_spare_core_(has_spare_core) {}

    Outcome run(Call& call, const Interrupted&, bool) override {
        ran_.push_back(call.count);
        return {};
    }
    void abort() override {}
    OutcomeCode failure() override { return OutcomeCode::ok; }
    bool has_spare_core() const override { return has_spare_core_; }

  private:
    std::vector<std::uint64_t>& ran_;
    bool has_spare_core_;
};

Call call_number(std::uint64_t number) {
    Call call;
    call.count = number;
    return call;
}

// The pauses are shorter than, equal to, and longer than the thread's spin budget.
void calls_run_in_order_whatever_their_intervals(bool has_spare_core) {
    std::vector<std::uint64_t> ran;
    CallQueue queue(std::make_unique<SingleRankCollectives>(ran, has_spare_core));
    std::uint64_t made = 0;
    for (const auto pause : {0us, 50us, 100us, 500us, 0us, 5000us, 0us})
        for (int i = 0; i < 20; ++i) {
            const auto work = queue.submit(call_number(++made));
            if (i % 2 == 0) CHECK(work->wait(kHung) && work->done() && work->outcome().code == OutcomeCode::ok);
            if (i % 5 == 0) {
                Call on_this_thread = call_number(++made);
                CHECK(queue.run(on_this_thread, [] { return false; }).code == OutcomeCode::ok);
            }
            if (i % 4 == 0) std::this_thread::sleep_for(pause);
        }
    CHECK(queue.submit(call_number(++made))->wait(kHung));
    CHECK(ran.size() == made);
    for (std::size_t i = 0; i < ran.size(); ++i) CHECK(ran[i] == i + 1);
}

void several_threads_queue_and_wait_for_calls(bool has_spare_core) {
    std::vector<std::uint64_t> ran;
    CallQueue queue(std::make_unique<SingleRankCollectives>(ran, has_spare_core));
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t)
        threads.emplace_back([&queue] {
            for (int i = 0; i < 200; ++i) {
                const auto work = queue.submit(call_number(1));
                std::thread other([&work] { CHECK(work->wait(kHung)); });
                CHECK(work->wait(kHung));
                other.join();
            }
        });
    for (std::thread& thread : threads) thread.join();
    CHECK(queue.submit(call_number(1))->wait(kHung));
    CHECK(ran.size() == 601);
}

// One thread of the process busy-waits and the other threads sleep. Each thread must be notified of its calls.
void several_queues_run_alternating_calls(bool has_spare_core) {
    std::vector<std::vector<std::uint64_t>> ran(3);
    std::vector<std::unique_ptr<CallQueue>> queues;
    for (auto& each : ran)
        queues.push_back(std::make_unique<CallQueue>(std::make_unique<SingleRankCollectives>(each, has_spare_core)));
    for (int i = 0; i < 100; ++i)
        for (const auto& queue : queues) CHECK(queue->submit(call_number(1))->wait(kHung));
    queues[1].reset();
    for (int i = 0; i < 100; ++i) CHECK(queues[2]->submit(call_number(1))->wait(kHung));
    CHECK(ran[0].size() == 100 && ran[1].size() == 100 && ran[2].size() == 200);
}

void a_queue_that_closes_runs_what_it_has_and_refuses_more(bool has_spare_core) {
    for (int i = 0; i < 50; ++i) {
        std::vector<std::uint64_t> ran;
        CallQueue queue(std::make_unique<SingleRankCollectives>(ran, has_spare_core));
        const auto work = queue.submit(call_number(1));
        if (i % 2 == 0) CHECK(work->wait(kHung));  // so that the thread is already waiting for the next call
        queue.close();
        CHECK(work->done() && ran.size() == 1);
        const auto late = queue.submit(call_number(2));
        CHECK(late->done() && late->outcome().code == OutcomeCode::interrupted && ran.size() == 1);
    }
}

void a_wait_ends_in_time() {
    class Slow final : public Collectives {
      public:
        explicit Slow(std::atomic<bool>& goes_on) : goes_on_(goes_on) {}
        Outcome run(Call&, const Interrupted&, bool) override {
            while (!goes_on_) std::this_thread::sleep_for(1ms);
            return {};
        }
        void abort() override {}
        OutcomeCode failure() override { return OutcomeCode::ok; }
        bool has_spare_core() const override { return true; }

      private:
        std::atomic<bool>& goes_on_;
    };
    std::atomic<bool> goes_on{false};
    CallQueue queue(std::make_unique<Slow>(goes_on));
    const auto work = queue.submit(call_number(1));
    CHECK(!work->wait(0) && !work->wait(1000) && !work->wait(1'000'000));
    goes_on = true;
    CHECK(work->wait(kHung) && work->wait(0));
}

void the_spin_budget_follows_the_intervals() {
    SpinBudget spin_budget;
    CHECK(spin_budget.left() == SpinBudget::kMin);
    spin_budget.record_wait(300us);
    CHECK(spin_budget.left() == 600us);
    spin_budget.record_wait(1us);
    CHECK(spin_budget.left() == SpinBudget::kMin);
    spin_budget.record_wait(1900us);
    CHECK(spin_budget.left() == SpinBudget::kMax);
    spin_budget.record_wait(SpinBudget::kMax);
    CHECK(spin_budget.left() == SpinBudget::kMax);
    spin_budget.record_wait(SpinBudget::kMax + 1ns);  // longer than the maximum busy-wait
    CHECK(spin_budget.left() == SpinBudget::kMin);
}

void the_spin_budget_is_zero_after_the_core_was_lost() {
    SpinBudget spin_budget;
    spin_budget.lost_core();
    for (int call = 0; call < SpinBudget::kCallsWithoutSpin; ++call) {
        CHECK(spin_budget.left() == 0ns);
        spin_budget.record_wait(300us);
    }
    CHECK(spin_budget.left() == 600us);
}

}  // namespace

int main() {
    the_spin_budget_follows_the_intervals();
    the_spin_budget_is_zero_after_the_core_was_lost();
    a_wait_ends_in_time();
    for (const bool has_spare_core : {false, true}) {
        calls_run_in_order_whatever_their_intervals(has_spare_core);
        several_threads_queue_and_wait_for_calls(has_spare_core);
        several_queues_run_alternating_calls(has_spare_core);
        a_queue_that_closes_runs_what_it_has_and_refuses_more(has_spare_core);
    }
    return 0;
}
