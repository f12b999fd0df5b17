// Tests whom a search along the chain of waits blames. The ranks are objects of one thread, and a link is a call of a
// function.
#include "call/wait_chain.hpp"

#include <algorithm>
#include <functional>
#include <memory>
#include <thread>

#include "check.hpp"

namespace {

using namespace paceline;

constexpr std::int64_t kSecond = 1'000'000'000;
constexpr std::uint64_t kA = 1, kB = 2;

using Names = std::vector<int>;

class Job {
  public:
    explicit Job(int size) {
        for (int name = 0; name < size; ++name) {
            waits_.push_back(std::make_unique<Waits>(name));
            links_.push_back(std::make_unique<Line>(*this, name));
            waits_.back()->add(*links_.back());
            entries_.emplace_back();
        }
        answers_.resize(waits_.size(), true);
    }

    Waits& of(int rank) { return *waits_[static_cast<std::size_t>(rank)]; }
    // The rank waits, on one thread more, in a call or with sequence 0 for a message.
    void waits(int rank, CallId in, Names whom, bool by_program = true) {
        entries_[static_cast<std::size_t>(rank)].push_back(std::make_unique<Waits::Entry>());
        entries_[static_cast<std::size_t>(rank)].back()->say(of(rank), {in, by_program, std::move(whom)});
    }
    void ends_its_waits(int rank) { entries_[static_cast<std::size_t>(rank)].clear(); }
    // The process is stopped, or no thread of it reads what others ask.
    void is_silent(int rank) { answers_[static_cast<std::size_t>(rank)] = false; }

    // The search of rank 0 into a call that waits for `awaited`.
    Finding finds(CallId in, const Names& awaited) {
        WaitChainSearch search(of(0), in, kSecond / 10, kSecond / 10);
        for (;;) {
            if (auto found = search.look(awaited)) return *found;
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
    }

  private:
    struct Line final : Waits::Link {
        Line(Job& of, int from) : job(of), mine(from) {}
        void serve() override {}
        bool ask(int name, const CallId& in) override {
            if (job.answers_[static_cast<std::size_t>(name)]) job.of(mine).heard(name, in, job.of(name).about(in));
            return true;
        }
        Job& job;
        int mine;
    };

    std::vector<std::unique_ptr<Waits>> waits_;
    std::vector<std::unique_ptr<Line>> links_;
    std::vector<std::vector<std::unique_ptr<Waits::Entry>>> entries_;
    std::vector<bool> answers_;
};

void a_rank_that_does_not_answer_is_to_blame() {
    Job job(2);
    job.is_silent(1);
    WaitChainSearch search(job.of(0), {kA, 1}, kSecond / 10, kSecond / 10);
    CHECK(!search.look({1}));  // its answer may still come
    const Finding found = job.finds({kA, 1}, {1});
    CHECK(found.holding_up == Names{1} && found.waiting.empty());
}

void a_rank_whose_program_does_not_wait_is_to_blame_at_once() {
    Job job(2);
    WaitChainSearch search(job.of(0), {kA, 1}, kSecond, kSecond);
    CHECK(!search.look({1}));  // asks
    const auto found = search.look({1});
    CHECK(found && found->holding_up == Names{1});
}

void a_rank_that_waits_for_a_silent_one_is_not_to_blame() {
    for (const CallId in : {CallId{kA, 4}, CallId{kB, 9}, CallId{kA, 0}, CallId{kB, 0}}) {
        Job job(4);
        job.is_silent(3);
        job.waits(1, {kA, 5}, {0, 2});
        job.waits(2, in, {3});
        const Finding found = job.finds({kA, 5}, {1, 2});
        CHECK(found.holding_up == Names{3} && (found.waiting == Names{1, 2}));
    }
}

void a_chain_is_followed_to_its_end() {
    Job job(6);
    job.is_silent(5);
    for (int rank = 1; rank < 5; ++rank) job.waits(rank, {static_cast<std::uint64_t>(rank), 0}, {rank + 1});
    const Finding found = job.finds({kA, 5}, {1});
    CHECK(found.holding_up == Names{5} && (found.waiting == Names{1, 2, 3, 4}));
}

void ranks_that_wait_for_each_other_are_not_told_apart() {
    Job job(3);
    job.waits(0, {kA, 2}, {1});
    job.waits(1, {kB, 2}, {2});
    job.waits(2, {kA, 0}, {0});
    const Finding found = job.finds({kA, 2}, {1});
    CHECK(found.holding_up.empty() && (found.waiting == Names{1, 2}));
}

// The others, whose time may be over a moment later, must find the same.
void a_rank_that_knows_the_answer_still_answers_for_a_while() {
    Job job(2);
    job.waits(0, {kA, 1}, {1});
    job.waits(1, {kB, 1}, {0});
    WaitChainSearch search(job.of(0), {kA, 1}, kSecond, kSecond);
    CHECK(!search.look({1}));  // asks
    CHECK(!search.look({1}));  // has the answer
    const Finding found = job.finds({kA, 1}, {1});
    CHECK(found.holding_up.empty() && found.waiting == Names{1});
}

// Somebody else holds the call up as well, but their wait does not end with that.
void ranks_that_wait_for_each_other_are_not_excused_by_another_one() {
    Job job(5);
    job.is_silent(4);
    job.waits(1, {kB, 2}, {2});
    job.waits(2, {kB, 0}, {1});
    job.waits(3, {kB, 0}, {1, 4});
    const Finding found = job.finds({kA, 2}, {1, 2, 3});
    CHECK(found.holding_up == Names{4} && found.waiting == Names{3});
}

// What it has sent is still under way.
void a_rank_past_the_call_is_not_to_blame_for_what_it_waits_for_there() {
    Job job(3);
    job.is_silent(2);
    job.waits(1, {kA, 6}, {2});
    const Finding found = job.finds({kA, 5}, {1});
    CHECK(found.holding_up.empty() && found.waiting.empty());
    job.waits(1, {kA, 5}, {2}, false);  // and another one has not
    CHECK(job.finds({kA, 5}, {1}).holding_up == Names{2});
}

// Its program may do anything meanwhile.
void an_asynchronous_call_excuses_a_rank_in_its_own_group_only() {
    Job job(3);
    job.is_silent(2);
    job.waits(1, {kB, 1}, {2}, false);
    CHECK(job.finds({kA, 5}, {1}).holding_up == Names{1});
    CHECK(job.finds({kB, 0}, {1}).holding_up == Names{1});
    CHECK(job.finds({kB, 1}, {1}).holding_up == Names{2});
    CHECK(job.finds({kB, 2}, {1}).holding_up == Names{2});
}

// The thread of asynchronous calls does its part, whatever the program waits for.
void what_a_program_waits_for_does_not_hold_up_a_call_that_it_has_begun() {
    Job job(4);
    job.is_silent(2);
    job.is_silent(3);
    job.waits(1, {kA, 5}, {2}, false);
    job.waits(1, {kB, 1}, {3});
    CHECK(job.finds({kA, 5}, {1}).holding_up == Names{2});
    job.ends_its_waits(1);
    job.waits(1, {kB, 1}, {3});
    CHECK(job.finds({kA, 5}, {1}).holding_up == Names{3});
}

void a_rank_follows_what_its_own_other_threads_wait_for() {
    Job job(3);
    job.is_silent(2);
    job.waits(0, {kA, 0}, {1});
    job.waits(0, {kB, 3}, {2}, false);
    job.waits(1, {kB, 3}, {0});
    CHECK(job.finds({kA, 0}, {1}).holding_up == Names{2});
}

void an_answer_that_nobody_asked_for_is_dropped() {
    Job job(2);
    job.is_silent(1);
    WaitChainSearch search(job.of(0), {kA, 1}, kSecond, kSecond);
    CHECK(!search.look({1}));
    job.of(0).heard(1, {kA, 2}, {Answer::Kind::past, {}});
    CHECK(!search.look({1}));
    job.of(0).heard(1, {kA, 1}, {Answer::Kind::past, {}});
    CHECK(search.look({1}));
}

// In a group of the names 10, 11 and so on, in which the ranks of `come` have begun the call.
Outcome blamed(const Finding& found, const Names& come, Names absent, const Names& awaited, bool is_certain = true) {
    const Members members{[](int rank) { return 10 + rank; },
                          [&come](int rank) { return std::find(come.begin(), come.end(), rank) != come.end(); }, 4,
                          is_certain};
    Outcome outcome;
    blame(outcome, found, members, std::move(absent), awaited);
    outcome.cause = cause_of_time_out(outcome, members);
    return outcome;
}

void the_outcome_tells_the_missing_the_waiting_and_those_who_hold_them_up() {
    const Outcome outside = blamed({{77}, {12}, {}}, {0, 1}, {2}, {2});
    CHECK(!outside.came && outside.missing == Names{2} && outside.waiting == Names{2} && outside.held_by == Names{77});
    CHECK((outside.cause == Cause{77, false, true}));
    const Outcome inside = blamed({{13}, {12}, {}}, {0, 1}, {2, 3}, {2});
    CHECK(!inside.came && (inside.missing == Names{2, 3}) && inside.waiting == Names{2} && inside.held_by.empty());
    CHECK((inside.cause == Cause{13, false, true}));
    const Outcome further = blamed({{13}, {11}, {}}, {0, 1}, {}, {1});
    CHECK(!further.came && further.missing == Names{3} && further.waiting.empty());
    const Outcome in_chain = blamed({{13}, {11}, {13}}, {0, 1}, {}, {1}, false);
    CHECK(!in_chain.came && in_chain.missing == Names{3} && in_chain.held_by.empty());
    const Outcome gone_on = blamed({{13}, {12}, {}}, {0, 1}, {2}, {2}, false);
    CHECK(gone_on.missing == Names{2} && gone_on.waiting == Names{2} && gone_on.held_by == Names{13});
    const Outcome through = blamed({{13}, {11, 12}, {11, 12}}, {0, 1}, {}, {1}, false);
    CHECK(!through.came && through.missing == Names{2} && through.waiting == Names{2} && through.held_by == Names{13});
    const Outcome stopped = blamed({{12}, {11, 13}, {}}, {0, 1, 2, 3}, {}, {1});
    CHECK(stopped.came && stopped.missing == Names{2} && stopped.waiting.empty() && stopped.held_by.empty());
    const Outcome stopped_inside = blamed({{13}, {12}, {}}, {0, 1, 3}, {2}, {2});
    CHECK(stopped_inside.missing == Names{2} && stopped_inside.held_by == Names{13});
    const Outcome circle = blamed({{}, {12}, {}}, {0, 1}, {2}, {2});
    CHECK(circle.missing == Names{2} && circle.waiting == Names{2} && circle.held_by.empty() && !circle.cause.known());
    const Outcome slow = blamed({{}, {11}, {}}, {0, 1, 2, 3}, {}, {1});
    CHECK(slow.came && slow.missing == Names{1} && slow.waiting.empty());
}

void a_cause_is_packed_with_its_kind() {
    for (const Cause cause : {Cause{5, false, false}, Cause{0, true, false}, Cause{1 << 20, false, true}})
        CHECK(Cause::unpack(cause.pack()) == cause);
    CHECK(!Cause::unpack(Cause{-1, false, true}.pack()).known());
}

}  // namespace

int main() {
    a_rank_that_does_not_answer_is_to_blame();
    a_rank_whose_program_does_not_wait_is_to_blame_at_once();
    a_rank_that_waits_for_a_silent_one_is_not_to_blame();
    a_chain_is_followed_to_its_end();
    ranks_that_wait_for_each_other_are_not_told_apart();
    a_rank_that_knows_the_answer_still_answers_for_a_while();
    ranks_that_wait_for_each_other_are_not_excused_by_another_one();
    a_rank_past_the_call_is_not_to_blame_for_what_it_waits_for_there();
    an_asynchronous_call_excuses_a_rank_in_its_own_group_only();
    what_a_program_waits_for_does_not_hold_up_a_call_that_it_has_begun();
    a_rank_follows_what_its_own_other_threads_wait_for();
    an_answer_that_nobody_asked_for_is_dropped();
    the_outcome_tells_the_missing_the_waiting_and_those_who_hold_them_up();
    a_cause_is_packed_with_its_kind();
}
