// Tests which ranks a search along the wait chain finds responsible. All ranks are objects in one thread, and a query
// is a function call.
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

using Ranks = std::vector<int>;

class WaitingRanks {
  public:
    explicit WaitingRanks(int size) {
        for (int global_rank = 0; global_rank < size; ++global_rank) {
            waits_.push_back(std::make_unique<WaitRegistry>(global_rank));
            transports_.push_back(std::make_unique<DirectTransport>(*this, global_rank));
            waits_.back()->add(*transports_.back());
            entries_.emplace_back();
        }
        answers_.resize(waits_.size(), true);
    }

    WaitRegistry& of(int rank) { return *waits_[static_cast<std::size_t>(rank)]; }
    // Adds a waiting thread to the rank. The thread waits in a call or, if the sequence is 0, for a message.
    void waits(int rank, CallId call, Ranks whom, bool by_program = true) {
        entries_[static_cast<std::size_t>(rank)].push_back(std::make_unique<WaitRegistry::Entry>());
        entries_[static_cast<std::size_t>(rank)].back()->update(of(rank), {call, by_program, std::move(whom)});
    }
    void ends_waits(int rank) { entries_[static_cast<std::size_t>(rank)].clear(); }
    // Simulates a rank whose process is stopped or has no thread that reads queries.
    void stops_answering(int rank) { answers_[static_cast<std::size_t>(rank)] = false; }

    // Returns the result when rank 0 searches for the ranks that block a call waiting for `awaited`.
    WaitChainResult finds(CallId call, const Ranks& awaited) {
        WaitChainSearch search(of(0), call, kSecond / 10, kSecond / 10);
        for (;;) {
            if (auto found = search.advance(awaited)) return *found;
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
    }

  private:
    struct DirectTransport final : WaitRegistry::QueryTransport {
        DirectTransport(WaitingRanks& of, int from) : ranks(of), mine(from) {}
        void serve() override {}
        bool send_query(int global_rank, const CallId& call) override {
            if (ranks.answers_[static_cast<std::size_t>(global_rank)])
                ranks.of(mine).receive_answer(global_rank, call, ranks.of(global_rank).answer_for(call));
            return true;
        }
        WaitingRanks& ranks;
        int mine;
    };

    std::vector<std::unique_ptr<WaitRegistry>> waits_;
    std::vector<std::unique_ptr<DirectTransport>> transports_;
    std::vector<std::vector<std::unique_ptr<WaitRegistry::Entry>>> entries_;
    std::vector<bool> answers_;
};

void a_rank_that_does_not_answer_is_responsible() {
    WaitingRanks ranks(2);
    ranks.stops_answering(1);
    WaitChainSearch search(ranks.of(0), {kA, 1}, kSecond / 10, kSecond / 10);
    CHECK(!search.advance({1}));  // its answer may still arrive
    const WaitChainResult found = ranks.finds({kA, 1}, {1});
    CHECK(found.blocking == Ranks{1} && found.waiting.empty());
}

void a_rank_whose_program_does_not_wait_is_responsible_at_once() {
    WaitingRanks ranks(2);
    WaitChainSearch search(ranks.of(0), {kA, 1}, kSecond, kSecond);
    CHECK(!search.advance({1}));  // sends the query
    const auto found = search.advance({1});
    CHECK(found && found->blocking == Ranks{1});
}

void a_rank_that_waits_for_a_silent_one_is_not_responsible() {
    for (const CallId call : {CallId{kA, 4}, CallId{kB, 9}, CallId{kA, 0}, CallId{kB, 0}}) {
        WaitingRanks ranks(4);
        ranks.stops_answering(3);
        ranks.waits(1, {kA, 5}, {0, 2});
        ranks.waits(2, call, {3});
        const WaitChainResult found = ranks.finds({kA, 5}, {1, 2});
        CHECK(found.blocking == Ranks{3} && (found.waiting == Ranks{1, 2}));
    }
}

void a_chain_is_followed_to_its_end() {
    WaitingRanks ranks(6);
    ranks.stops_answering(5);
    for (int rank = 1; rank < 5; ++rank) ranks.waits(rank, {static_cast<std::uint64_t>(rank), 0}, {rank + 1});
    const WaitChainResult found = ranks.finds({kA, 5}, {1});
    CHECK(found.blocking == Ranks{5} && (found.waiting == Ranks{1, 2, 3, 4}));
}

void ranks_in_a_deadlock_are_equally_responsible() {
    WaitingRanks ranks(3);
    ranks.waits(0, {kA, 2}, {1});
    ranks.waits(1, {kB, 2}, {2});
    ranks.waits(2, {kA, 0}, {0});
    const WaitChainResult found = ranks.finds({kA, 2}, {1});
    CHECK(found.blocking.empty() && (found.waiting == Ranks{1, 2}));
}

// Other ranks may time out slightly later, and their searches must have the same result.
void a_rank_answers_for_a_while_after_its_search() {
    WaitingRanks ranks(2);
    ranks.waits(0, {kA, 1}, {1});
    ranks.waits(1, {kB, 1}, {0});
    WaitChainSearch search(ranks.of(0), {kA, 1}, kSecond, kSecond);
    CHECK(!search.advance({1}));  // sends the query
    CHECK(!search.advance({1}));  // the answer has been received
    const WaitChainResult found = ranks.finds({kA, 1}, {1});
    CHECK(found.blocking.empty() && found.waiting == Ranks{1});
}

// Rank 4 also blocks the call, but ranks 1 and 2 would still wait for each other if rank 4 continued.
void ranks_in_a_deadlock_are_not_excused_by_another_rank() {
    WaitingRanks ranks(5);
    ranks.stops_answering(4);
    ranks.waits(1, {kB, 2}, {2});
    ranks.waits(2, {kB, 0}, {1});
    ranks.waits(3, {kB, 0}, {1, 4});
    const WaitChainResult found = ranks.finds({kA, 2}, {1, 2, 3});
    CHECK(found.blocking == Ranks{4} && found.waiting == Ranks{3});
}

// The data that the rank sent in the earlier call is still in flight.
void a_rank_in_a_later_call_is_not_responsible_for_its_wait_there() {
    WaitingRanks ranks(3);
    ranks.stops_answering(2);
    ranks.waits(1, {kA, 6}, {2});
    const WaitChainResult found = ranks.finds({kA, 5}, {1});
    CHECK(found.blocking.empty() && found.waiting.empty());
    ranks.waits(1, {kA, 5}, {2}, false);  // another thread has not finished the earlier call
    CHECK(ranks.finds({kA, 5}, {1}).blocking == Ranks{2});
}

// The rank's program may be in any other call.
void an_asynchronous_call_excuses_a_rank_in_its_own_group_only() {
    WaitingRanks ranks(3);
    ranks.stops_answering(2);
    ranks.waits(1, {kB, 1}, {2}, false);
    CHECK(ranks.finds({kA, 5}, {1}).blocking == Ranks{1});
    CHECK(ranks.finds({kB, 0}, {1}).blocking == Ranks{1});
    CHECK(ranks.finds({kB, 1}, {1}).blocking == Ranks{2});
    CHECK(ranks.finds({kB, 2}, {1}).blocking == Ranks{2});
}

// The thread for asynchronous calls runs its call even while the program is waiting in another call.
void a_wait_of_the_program_does_not_block_a_call_that_it_has_begun() {
    WaitingRanks ranks(4);
    ranks.stops_answering(2);
    ranks.stops_answering(3);
    ranks.waits(1, {kA, 5}, {2}, false);
    ranks.waits(1, {kB, 1}, {3});
    CHECK(ranks.finds({kA, 5}, {1}).blocking == Ranks{2});
    ranks.ends_waits(1);
    ranks.waits(1, {kB, 1}, {3});
    CHECK(ranks.finds({kA, 5}, {1}).blocking == Ranks{3});
}

void a_rank_follows_what_its_own_other_threads_wait_for() {
    WaitingRanks ranks(3);
    ranks.stops_answering(2);
    ranks.waits(0, {kA, 0}, {1});
    ranks.waits(0, {kB, 3}, {2}, false);
    ranks.waits(1, {kB, 3}, {0});
    CHECK(ranks.finds({kA, 0}, {1}).blocking == Ranks{2});
}

void an_answer_without_a_query_is_dropped() {
    WaitingRanks ranks(2);
    ranks.stops_answering(1);
    WaitChainSearch search(ranks.of(0), {kA, 1}, kSecond, kSecond);
    CHECK(!search.advance({1}));
    ranks.of(0).receive_answer(1, {kA, 2}, {Answer::Kind::completed, {}});
    CHECK(!search.advance({1}));
    ranks.of(0).receive_answer(1, {kA, 1}, {Answer::Kind::completed, {}});
    CHECK(search.advance({1}));
}

// Returns the outcome in a group that consists of the global ranks 10 to 13. The group ranks in `begun` have begun the
// call.
Outcome outcome_of(const WaitChainResult& found, const Ranks& begun, Ranks absent, const Ranks& awaited,
                   bool is_certain = true) {
    const GroupMembers members{
        [](int rank) { return 10 + rank; },
        [&begun](int rank) { return std::find(begun.begin(), begun.end(), rank) != begun.end(); }, 4, is_certain};
    Outcome outcome;
    attribute_timeout(outcome, found, members, std::move(absent), awaited);
    outcome.cause = cause_of_timeout(outcome, members);
    return outcome;
}

void the_outcome_lists_the_missing_the_waiting_and_the_blocking_ranks() {
    const Outcome outside = outcome_of({{77}, {12}, {}}, {0, 1}, {2}, {2});
    CHECK(!outside.has_begun && outside.missing == Ranks{2} && outside.waiting == Ranks{2} &&
          outside.blocked_by == Ranks{77});
    CHECK((outside.cause == FailureCause{77, false, true}));
    const Outcome inside = outcome_of({{13}, {12}, {}}, {0, 1}, {2, 3}, {2});
    CHECK(!inside.has_begun && (inside.missing == Ranks{2, 3}) && inside.waiting == Ranks{2} &&
          inside.blocked_by.empty());
    CHECK((inside.cause == FailureCause{13, false, true}));
    const Outcome further = outcome_of({{13}, {11}, {}}, {0, 1}, {}, {1});
    CHECK(!further.has_begun && further.missing == Ranks{3} && further.waiting.empty());
    const Outcome in_chain = outcome_of({{13}, {11}, {13}}, {0, 1}, {}, {1}, false);
    CHECK(!in_chain.has_begun && in_chain.missing == Ranks{3} && in_chain.blocked_by.empty());
    const Outcome gone_on = outcome_of({{13}, {12}, {}}, {0, 1}, {2}, {2}, false);
    CHECK(gone_on.missing == Ranks{2} && gone_on.waiting == Ranks{2} && gone_on.blocked_by == Ranks{13});
    const Outcome through = outcome_of({{13}, {11, 12}, {11, 12}}, {0, 1}, {}, {1}, false);
    CHECK(!through.has_begun && through.missing == Ranks{2} && through.waiting == Ranks{2} &&
          through.blocked_by == Ranks{13});
    const Outcome stopped = outcome_of({{12}, {11, 13}, {}}, {0, 1, 2, 3}, {}, {1});
    CHECK(stopped.has_begun && stopped.missing == Ranks{2} && stopped.waiting.empty() && stopped.blocked_by.empty());
    const Outcome stopped_inside = outcome_of({{13}, {12}, {}}, {0, 1, 3}, {2}, {2});
    CHECK(stopped_inside.missing == Ranks{2} && stopped_inside.blocked_by == Ranks{13});
    const Outcome circle = outcome_of({{}, {12}, {}}, {0, 1}, {2}, {2});
    CHECK(circle.missing == Ranks{2} && circle.waiting == Ranks{2} && circle.blocked_by.empty() &&
          !circle.cause.known());
    const Outcome slow = outcome_of({{}, {11}, {}}, {0, 1, 2, 3}, {}, {1});
    CHECK(slow.has_begun && slow.missing == Ranks{1} && slow.waiting.empty());
}

void a_cause_is_packed_with_its_kind() {
    for (const FailureCause cause :
         {FailureCause{5, false, false}, FailureCause{0, true, false}, FailureCause{1 << 20, false, true}})
        CHECK(FailureCause::unpack(cause.pack()) == cause);
    CHECK(!FailureCause::unpack(FailureCause{-1, false, true}.pack()).known());
}

}  // namespace

int main() {
    a_rank_that_does_not_answer_is_responsible();
    a_rank_whose_program_does_not_wait_is_responsible_at_once();
    a_rank_that_waits_for_a_silent_one_is_not_responsible();
    a_chain_is_followed_to_its_end();
    ranks_in_a_deadlock_are_equally_responsible();
    a_rank_answers_for_a_while_after_its_search();
    ranks_in_a_deadlock_are_not_excused_by_another_rank();
    a_rank_in_a_later_call_is_not_responsible_for_its_wait_there();
    an_asynchronous_call_excuses_a_rank_in_its_own_group_only();
    a_wait_of_the_program_does_not_block_a_call_that_it_has_begun();
    a_rank_follows_what_its_own_other_threads_wait_for();
    an_answer_without_a_query_is_dropped();
    the_outcome_lists_the_missing_the_waiting_and_the_blocking_ranks();
    a_cause_is_packed_with_its_kind();
}
