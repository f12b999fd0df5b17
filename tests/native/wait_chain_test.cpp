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
        for (int global_rank = 0; global_rank < size; ++global_rank) {
            waits_.push_back(std::make_unique<WaitRegistry>(global_rank));
            transports_.push_back(std::make_unique<DirectTransport>(*this, global_rank));
            waits_.back()->add(*transports_.back());
            entries_.emplace_back();
        }
        answers_.resize(waits_.size(), true);
    }

    WaitRegistry& of(int rank) { return *waits_[static_cast<std::size_t>(rank)]; }
    // The rank waits, on one thread more, in a call or with sequence 0 for a message.
    void waits(int rank, CallId call, Names whom, bool by_program = true) {
        entries_[static_cast<std::size_t>(rank)].push_back(std::make_unique<WaitRegistry::Entry>());
        entries_[static_cast<std::size_t>(rank)].back()->update(of(rank), {call, by_program, std::move(whom)});
    }
    void ends_its_waits(int rank) { entries_[static_cast<std::size_t>(rank)].clear(); }
    // The process is stopped, or no thread of it reads what others ask.
    void is_silent(int rank) { answers_[static_cast<std::size_t>(rank)] = false; }

    // The search of rank 0 into a call that waits for `awaited`.
    WaitChainResult finds(CallId call, const Names& awaited) {
        WaitChainSearch search(of(0), call, kSecond / 10, kSecond / 10);
        for (;;) {
            if (auto found = search.advance(awaited)) return *found;
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
    }

  private:
    struct DirectTransport final : WaitRegistry::QueryTransport {
        DirectTransport(Job& of, int from) : job(of), mine(from) {}
        void serve() override {}
        bool send_query(int global_rank, const CallId& call) override {
            if (job.answers_[static_cast<std::size_t>(global_rank)])
                job.of(mine).receive_answer(global_rank, call, job.of(global_rank).answer_for(call));
            return true;
        }
        Job& job;
        int mine;
    };

    std::vector<std::unique_ptr<WaitRegistry>> waits_;
    std::vector<std::unique_ptr<DirectTransport>> transports_;
    std::vector<std::vector<std::unique_ptr<WaitRegistry::Entry>>> entries_;
    std::vector<bool> answers_;
};

void a_rank_that_does_not_answer_is_to_blame() {
    Job job(2);
    job.is_silent(1);
    WaitChainSearch search(job.of(0), {kA, 1}, kSecond / 10, kSecond / 10);
    CHECK(!search.advance({1}));  // its answer may still come
    const WaitChainResult found = job.finds({kA, 1}, {1});
    CHECK(found.blocking == Names{1} && found.waiting.empty());
}

void a_rank_whose_program_does_not_wait_is_to_blame_at_once() {
    Job job(2);
    WaitChainSearch search(job.of(0), {kA, 1}, kSecond, kSecond);
    CHECK(!search.advance({1}));  // asks
    const auto found = search.advance({1});
    CHECK(found && found->blocking == Names{1});
}

void a_rank_that_waits_for_a_silent_one_is_not_to_blame() {
    for (const CallId call : {CallId{kA, 4}, CallId{kB, 9}, CallId{kA, 0}, CallId{kB, 0}}) {
        Job job(4);
        job.is_silent(3);
        job.waits(1, {kA, 5}, {0, 2});
        job.waits(2, call, {3});
        const WaitChainResult found = job.finds({kA, 5}, {1, 2});
        CHECK(found.blocking == Names{3} && (found.waiting == Names{1, 2}));
    }
}

void a_chain_is_followed_to_its_end() {
    Job job(6);
    job.is_silent(5);
    for (int rank = 1; rank < 5; ++rank) job.waits(rank, {static_cast<std::uint64_t>(rank), 0}, {rank + 1});
    const WaitChainResult found = job.finds({kA, 5}, {1});
    CHECK(found.blocking == Names{5} && (found.waiting == Names{1, 2, 3, 4}));
}

void ranks_that_wait_for_each_other_are_not_told_apart() {
    Job job(3);
    job.waits(0, {kA, 2}, {1});
    job.waits(1, {kB, 2}, {2});
    job.waits(2, {kA, 0}, {0});
    const WaitChainResult found = job.finds({kA, 2}, {1});
    CHECK(found.blocking.empty() && (found.waiting == Names{1, 2}));
}

// The others, whose time may be over a moment later, must find the same.
void a_rank_that_knows_the_answer_still_answers_for_a_while() {
    Job job(2);
    job.waits(0, {kA, 1}, {1});
    job.waits(1, {kB, 1}, {0});
    WaitChainSearch search(job.of(0), {kA, 1}, kSecond, kSecond);
    CHECK(!search.advance({1}));  // asks
    CHECK(!search.advance({1}));  // has the answer
    const WaitChainResult found = job.finds({kA, 1}, {1});
    CHECK(found.blocking.empty() && found.waiting == Names{1});
}

// Somebody else holds the call up as well, but their wait does not end with that.
void ranks_that_wait_for_each_other_are_not_excused_by_another_one() {
    Job job(5);
    job.is_silent(4);
    job.waits(1, {kB, 2}, {2});
    job.waits(2, {kB, 0}, {1});
    job.waits(3, {kB, 0}, {1, 4});
    const WaitChainResult found = job.finds({kA, 2}, {1, 2, 3});
    CHECK(found.blocking == Names{4} && found.waiting == Names{3});
}

// What it has sent is still under way.
void a_rank_past_the_call_is_not_to_blame_for_what_it_waits_for_there() {
    Job job(3);
    job.is_silent(2);
    job.waits(1, {kA, 6}, {2});
    const WaitChainResult found = job.finds({kA, 5}, {1});
    CHECK(found.blocking.empty() && found.waiting.empty());
    job.waits(1, {kA, 5}, {2}, false);  // and another one has not
    CHECK(job.finds({kA, 5}, {1}).blocking == Names{2});
}

// Its program may do anything meanwhile.
void an_asynchronous_call_excuses_a_rank_in_its_own_group_only() {
    Job job(3);
    job.is_silent(2);
    job.waits(1, {kB, 1}, {2}, false);
    CHECK(job.finds({kA, 5}, {1}).blocking == Names{1});
    CHECK(job.finds({kB, 0}, {1}).blocking == Names{1});
    CHECK(job.finds({kB, 1}, {1}).blocking == Names{2});
    CHECK(job.finds({kB, 2}, {1}).blocking == Names{2});
}

// The thread of asynchronous calls does its part, whatever the program waits for.
void what_a_program_waits_for_does_not_hold_up_a_call_that_it_has_begun() {
    Job job(4);
    job.is_silent(2);
    job.is_silent(3);
    job.waits(1, {kA, 5}, {2}, false);
    job.waits(1, {kB, 1}, {3});
    CHECK(job.finds({kA, 5}, {1}).blocking == Names{2});
    job.ends_its_waits(1);
    job.waits(1, {kB, 1}, {3});
    CHECK(job.finds({kA, 5}, {1}).blocking == Names{3});
}

void a_rank_follows_what_its_own_other_threads_wait_for() {
    Job job(3);
    job.is_silent(2);
    job.waits(0, {kA, 0}, {1});
    job.waits(0, {kB, 3}, {2}, false);
    job.waits(1, {kB, 3}, {0});
    CHECK(job.finds({kA, 0}, {1}).blocking == Names{2});
}

void an_answer_that_nobody_asked_for_is_dropped() {
    Job job(2);
    job.is_silent(1);
    WaitChainSearch search(job.of(0), {kA, 1}, kSecond, kSecond);
    CHECK(!search.advance({1}));
    job.of(0).receive_answer(1, {kA, 2}, {Answer::Kind::completed, {}});
    CHECK(!search.advance({1}));
    job.of(0).receive_answer(1, {kA, 1}, {Answer::Kind::completed, {}});
    CHECK(search.advance({1}));
}

// In a group of the names 10, 11 and so on, in which the ranks of `come` have begun the call.
Outcome reported_cause(const WaitChainResult& found, const Names& come, Names absent, const Names& awaited,
                       bool is_certain = true) {
    const GroupMembers members{[](int rank) { return 10 + rank; },
                               [&come](int rank) { return std::find(come.begin(), come.end(), rank) != come.end(); }, 4,
                               is_certain};
    Outcome outcome;
    attribute_timeout(outcome, found, members, std::move(absent), awaited);
    outcome.cause = cause_of_timeout(outcome, members);
    return outcome;
}

void the_outcome_tells_the_missing_the_waiting_and_those_who_hold_them_up() {
    const Outcome outside = reported_cause({{77}, {12}, {}}, {0, 1}, {2}, {2});
    CHECK(!outside.has_begun && outside.missing == Names{2} && outside.waiting == Names{2} &&
          outside.blocked_by == Names{77});
    CHECK((outside.cause == FailureCause{77, false, true}));
    const Outcome inside = reported_cause({{13}, {12}, {}}, {0, 1}, {2, 3}, {2});
    CHECK(!inside.has_begun && (inside.missing == Names{2, 3}) && inside.waiting == Names{2} &&
          inside.blocked_by.empty());
    CHECK((inside.cause == FailureCause{13, false, true}));
    const Outcome further = reported_cause({{13}, {11}, {}}, {0, 1}, {}, {1});
    CHECK(!further.has_begun && further.missing == Names{3} && further.waiting.empty());
    const Outcome in_chain = reported_cause({{13}, {11}, {13}}, {0, 1}, {}, {1}, false);
    CHECK(!in_chain.has_begun && in_chain.missing == Names{3} && in_chain.blocked_by.empty());
    const Outcome gone_on = reported_cause({{13}, {12}, {}}, {0, 1}, {2}, {2}, false);
    CHECK(gone_on.missing == Names{2} && gone_on.waiting == Names{2} && gone_on.blocked_by == Names{13});
    const Outcome through = reported_cause({{13}, {11, 12}, {11, 12}}, {0, 1}, {}, {1}, false);
    CHECK(!through.has_begun && through.missing == Names{2} && through.waiting == Names{2} &&
          through.blocked_by == Names{13});
    const Outcome stopped = reported_cause({{12}, {11, 13}, {}}, {0, 1, 2, 3}, {}, {1});
    CHECK(stopped.has_begun && stopped.missing == Names{2} && stopped.waiting.empty() && stopped.blocked_by.empty());
    const Outcome stopped_inside = reported_cause({{13}, {12}, {}}, {0, 1, 3}, {2}, {2});
    CHECK(stopped_inside.missing == Names{2} && stopped_inside.blocked_by == Names{13});
    const Outcome circle = reported_cause({{}, {12}, {}}, {0, 1}, {2}, {2});
    CHECK(circle.missing == Names{2} && circle.waiting == Names{2} && circle.blocked_by.empty() &&
          !circle.cause.known());
    const Outcome slow = reported_cause({{}, {11}, {}}, {0, 1, 2, 3}, {}, {1});
    CHECK(slow.has_begun && slow.missing == Names{1} && slow.waiting.empty());
}

void a_cause_is_packed_with_its_kind() {
    for (const FailureCause cause :
         {FailureCause{5, false, false}, FailureCause{0, true, false}, FailureCause{1 << 20, false, true}})
        CHECK(FailureCause::unpack(cause.pack()) == cause);
    CHECK(!FailureCause::unpack(FailureCause{-1, false, true}.pack()).known());
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
