// Tests messages between ranks: order, tags, sizes, and every way in which a message can fail.
#include "executor/messenger.hpp"

#include <linux/tcp.h>
#include <unistd.h>

#include <atomic>

#include "ranks.hpp"

namespace {

using namespace ranks;

using Bytes = std::vector<std::uint8_t>;

// Copies from one long sequence, because with sanitizers it is slow to compute each byte.
Bytes pattern(std::size_t nbytes, int seed) {
    static const Bytes run = [] {
        Bytes bytes(3'100'000);
        for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(i * 17 + i / 253);
        return bytes;
    }();
    const auto from = run.begin() + 7 * seed;
    return {from, from + static_cast<std::ptrdiff_t>(nbytes)};
}

Outcome sent(Rank& at, int peer, int tag, Bytes bytes, std::int64_t timeout_ns = kHung) {
    const auto request = at.messenger.send(peer, tag, DType::u8, stream_of(bytes), timeout_ns);
    CHECK(at.messenger.wait(request, 2 * kHung, nullptr));
    return request->outcome();
}

struct ReceivedMessage {
    Outcome outcome;
    Bytes bytes;
    int source;
};

ReceivedMessage received(Rank& at, int peer, int tag, std::size_t nbytes, std::int64_t timeout_ns = kHung,
                         const Interrupted& interrupted = nullptr) {
    Bytes bytes(nbytes);
    const auto request = at.messenger.receive(peer, tag, DType::u8, stream_of(bytes), timeout_ns);
    CHECK(at.messenger.wait(request, 2 * kHung, interrupted));
    return {request->outcome(), std::move(bytes), request->source()};
}

// No rank leaves before all ranks have reached this point, so that departures do not affect the test.
void wait_for_all(Rank& at) {
    for (int peer = 0; peer < at.size; ++peer)
        if (peer != at.rank) CHECK(sent(at, peer, 1000, {}).code == OutcomeCode::ok);
    for (int peer = 0; peer < at.size; ++peer)
        if (peer != at.rank) CHECK(received(at, peer, 1000, 0).outcome.code == OutcomeCode::ok);
}

void messages_of_every_size_arrive_before_and_after_their_receive(Over over) {
    with_ranks(2, 1, over, [](Rank at) {
        const std::size_t sizes[] = {0, 1, 47, 48, 16 << 10, (16 << 10) + 1, 300'000, (1 << 20) + 1, 3'000'001};
        for (const bool receiver_first : {true, false}) {
            int seed = 0;
            for (const std::size_t nbytes : sizes) {
                ++seed;
                if ((at.rank == 0) == receiver_first) pause(2);
                if (at.rank == 0) {
                    CHECK(sent(at, 1, 3, pattern(nbytes, seed)).code == OutcomeCode::ok);
                } else {
                    const ReceivedMessage got = received(at, 0, 3, nbytes);
                    CHECK(got.outcome.code == OutcomeCode::ok && got.source == 0 && got.bytes == pattern(nbytes, seed));
                }
            }
        }
        wait_for_all(at);
    });
}

void messages_are_sent_between_lists_of_ranges() {
    with_ranks(2, 1, Over::sockets, [](Rank at) {
        Bytes bytes = at.rank == 0 ? pattern(500'000, 9) : Bytes(500'000);
        std::vector<ByteRange> ranges;
        std::size_t from = 0;
        for (std::size_t n = at.rank == 0 ? 1 : 5000; from < bytes.size(); n = n * 3 % 70'001) {
            const std::size_t length = std::min(n, bytes.size() - from);
            ranges.push_back({bytes.data() + from, length});
            ranges.push_back({nullptr, 0});
            from += length;
        }
        const ByteStream stream(std::move(ranges));
        const auto request = at.rank == 0 ? at.messenger.send(1, 0, DType::u8, stream, kHung)
                                          : at.messenger.receive(0, 0, DType::u8, stream, kHung);
        CHECK(at.messenger.wait(request, kHung, nullptr) && request->outcome().code == OutcomeCode::ok);
        CHECK(bytes == pattern(500'000, 9));
        wait_for_all(at);
    });
}

void messages_match_by_tag_and_keep_their_order_within_it() {
    with_ranks(2, 1, Over::sockets, [](Rank at) {
        // Small and large messages alternate, because a small message must not overtake an earlier large one.
        const std::size_t sizes[] = {10, 100'000, 10, 100'000};
        if (at.rank == 0) {
            std::vector<Bytes> bytes;
            std::vector<std::shared_ptr<Request>> requests;
            for (int i = 0; i < 8; ++i) bytes.push_back(pattern(sizes[i % 4], i));
            for (int i = 0; i < 8; ++i)
                requests.push_back(
                    at.messenger.send(1, i / 4, DType::u8, stream_of(bytes[static_cast<std::size_t>(i)]), kHung));
            for (const auto& request : requests) CHECK(at.messenger.wait(request, kHung, nullptr));
        } else {
            for (const int i : {4, 5, 6, 7, 0, 1, 2, 3})
                CHECK(received(at, 0, i / 4, sizes[i % 4]).bytes == pattern(sizes[i % 4], i));
        }
        wait_for_all(at);
    });
}

void a_receive_from_any_source_takes_each_message_once() {
    with_ranks(3, 1, Over::sockets, [](Rank at) {
        if (at.rank == 0) {
            int times[3] = {0, 0, 0};
            for (int i = 0; i < 40; ++i) {
                const ReceivedMessage got = received(at, kAnySource, 7, 20'000);
                CHECK(got.outcome.code == OutcomeCode::ok && got.source > 0);
                CHECK(got.bytes == pattern(20'000, 100 * got.source + times[got.source]));
                ++times[got.source];
            }
            CHECK(times[1] == 20 && times[2] == 20);
        } else {
            for (int i = 0; i < 20; ++i)
                CHECK(sent(at, 0, 7, pattern(20'000, 100 * at.rank + i)).code == OutcomeCode::ok);
        }
        wait_for_all(at);
    });
}

// A receive may be posted when part of a message has already arrived. The receive must then match this message and no
// other.
void a_receive_may_be_posted_while_its_message_arrives(Over over) {
    std::atomic<bool> has_begun = false;
    std::atomic<bool> is_posted = false;
    with_ranks(2, 1, over, [&](Rank at) {
        if (at.rank == 0) {
            Bytes bytes = pattern(900, 1);
            Frame frame{.kind = FrameKind::eager, .id = 1, .nbytes = bytes.size(), .tag = 4};
            const ByteRange begin[] = {{reinterpret_cast<std::uint8_t*>(&frame), sizeof frame}, {bytes.data(), 400}};
            const ByteRange end{bytes.data() + 400, 500};
            link::Lane& lane = *at.lanes.peer(1).control;
            CHECK(lane.write(begin) == static_cast<std::ptrdiff_t>(sizeof frame + 400));
            has_begun = true;
            while (!is_posted) pause(1);
            CHECK(lane.write({&end, 1}) == 500);
        } else {
            while (!has_begun) pause(1);
            at.messenger.poll();
            Bytes bytes(900);
            const auto request = at.messenger.receive(0, 4, DType::u8, stream_of(bytes), kSecond);
            is_posted = true;
            CHECK(at.messenger.wait(request, kHung, nullptr) && request->outcome().code == OutcomeCode::ok);
            CHECK(request->source() == 0 && bytes == pattern(900, 1));
        }
    });
}

void a_message_that_does_not_fit_fails_alone() {
    with_ranks(2, 1, Over::sockets, [](Rank at) {
        for (const std::size_t nbytes : {std::size_t{100}, std::size_t{100'000}}) {
            if (at.rank == 0) {
                const OutcomeCode notified = sent(at, 1, 0, pattern(nbytes, 1)).code;
                CHECK(notified ==
                      (nbytes == 100 ? OutcomeCode::ok : OutcomeCode::mismatch));  // a small send completes at once
            } else {
                const Outcome outcome = received(at, 0, 0, nbytes + 1).outcome;
                CHECK(outcome.code == OutcomeCode::mismatch && outcome.split_from == 0 && outcome.split_to == 1);
                CHECK(outcome.split_sent == nbytes && outcome.split_expected == nbytes + 1);
            }
            if (at.rank == 0)
                CHECK(sent(at, 1, 0, pattern(nbytes, 2)).code == OutcomeCode::ok);
            else
                CHECK(received(at, 0, 0, nbytes).bytes == pattern(nbytes, 2));
        }
        wait_for_all(at);
    });
}

void many_messages_may_be_outstanding_both_ways() {
    with_ranks(2, 1, Over::sockets, [](Rank at) {
        constexpr std::size_t kMany = 1500;
        std::vector<Bytes> out, in;
        std::vector<std::shared_ptr<Request>> requests;
        for (std::size_t i = 0; i < kMany; ++i) {
            out.push_back(pattern(i * 37 % 40'000, static_cast<int>(i) + at.rank));
            in.emplace_back(i * 37 % 40'000);
        }
        for (std::size_t i = 0; i < kMany; ++i)
            requests.push_back(at.messenger.send(1 - at.rank, 0, DType::u8, stream_of(out[i]), kHung));
        at.messenger.run_in_background();
        for (std::size_t i = 0; i < kMany; ++i)
            requests.push_back(at.messenger.receive(1 - at.rank, 0, DType::u8, stream_of(in[i]), kHung));
        for (const auto& request : requests)
            CHECK(at.messenger.wait(request, kHung, nullptr) && request->outcome().code == OutcomeCode::ok);
        for (std::size_t i = 0; i < kMany; ++i)
            CHECK(in[i] == pattern(i * 37 % 40'000, static_cast<int>(i) + 1 - at.rank));
        wait_for_all(at);
    });
}

void unmatched_offers_are_bounded() {
    with_ranks(2, 1, Over::sockets, [](Rank at) {
        Bytes bytes(kEagerBytes + 1);
        if (at.rank == 0) {
            std::vector<std::shared_ptr<Request>> requests;
            for (std::size_t i = 0; i <= kMaxOffers; ++i)
                requests.push_back(at.messenger.send(1, 0, DType::u8, stream_of(bytes), kHung));
            CHECK(requests.back()->done() && requests.back()->outcome().code == OutcomeCode::too_many_offers);
            CHECK(!requests[kMaxOffers - 1]->done());
            CHECK(at.messenger.wait(requests.front(), kHung, nullptr));
            CHECK(sent(at, 1, 0, bytes).code != OutcomeCode::too_many_offers);
        } else {
            CHECK(received(at, 0, 0, bytes.size()).outcome.code == OutcomeCode::ok);
            at.messenger.close();
        }
    });
}

void threads_of_one_rank_may_wait_at_the_same_time() {
    with_ranks(2, 1, Over::sockets, [](Rank at) {
        std::vector<std::thread> threads;
        for (int tag = 0; tag < 4; ++tag)
            threads.emplace_back([&at, tag] {
                for (int i = 0; i < 30; ++i) {
                    const std::size_t nbytes = i % 3 == 0 ? 50'000 : 100;
                    if ((at.rank + tag) % 2 == 0)
                        CHECK(sent(at, 1 - at.rank, tag, pattern(nbytes, i)).code == OutcomeCode::ok);
                    else
                        CHECK(received(at, 1 - at.rank, tag, nbytes).bytes == pattern(nbytes, i));
                }
            });
        for (std::thread& thread : threads) thread.join();
        wait_for_all(at);
    });
}

void a_wait_can_be_interrupted_while_another_thread_drives() {
    with_ranks(2, 1, Over::sockets, [](Rank at) {
        if (at.rank == 1) {
            CHECK(received(at, 0, 5, 1).outcome.code == OutcomeCode::interrupted);  // the interrupt broke the group
            return;
        }
        std::thread driver([&at] { CHECK(received(at, 1, 1, 10).outcome.code == OutcomeCode::interrupted); });
        pause(100);
        Bytes bytes(10);
        const auto request = at.messenger.receive(1, 2, DType::u8, stream_of(bytes), kHung);
        const auto started = Clock::now();
        CHECK(at.messenger.wait(request, kHung, [&] { return seconds_since(started) > 0.1; }));
        CHECK(request->outcome().code == OutcomeCode::interrupted && seconds_since(started) < kSoonS);
        driver.join();
    });
}

void a_timeout_names_the_missing_rank_while_others_communicate() {
    std::atomic<int> notified = 0;
    with_ranks(3, 1, Over::sockets, [&](Rank at) {
        if (at.rank == 2) {
            while (notified < 2) pause(1);
            return;
        }
        if (at.rank == 1) {
            // Sends without a pause until a send fails.
            const Bytes word(100);
            while (sent(at, 0, 1, word).code == OutcomeCode::ok) {
            }
            const auto failure = at.messenger.failure();
            CHECK(failure && failure->code == OutcomeCode::timed_out && failure->reporter == 0);
            CHECK((failure->missing == std::vector<int>{2}));
            ++notified;
            return;
        }
        const auto started = Clock::now();
        std::thread listener([&at] {
            while (received(at, 1, 1, 100).outcome.code == OutcomeCode::ok) {
            }
        });
        const Outcome outcome = received(at, 2, 0, 10, 300 * kMs).outcome;
        CHECK(outcome.code == OutcomeCode::timed_out && (outcome.missing == std::vector<int>{2}));
        CHECK(outcome.waited_ns >= 300 * kMs && seconds_since(started) < kSoonS);
        listener.join();
        ++notified;
    });
}

void a_rank_that_left_is_distinguished_from_one_that_died(Over over) {
    for (const bool waits : {true, false}) {
        std::atomic<bool> closed = false;
        with_ranks(2, 1, over, [waits, &closed](Rank at) {
            wait_for_all(at);
            if (at.rank == 1) {
                CHECK(sent(at, 0, 0, pattern(100, 1)).code == OutcomeCode::ok);
                at.messenger.close();
                closed = true;
                return;
            }
            if (!waits) {
                while (!closed) pause(1);
                // Rank 0 has not read its input yet, and these writes fail because the other end is closed.
                for (int i = 0; i < 3; ++i) static_cast<void>(sent(at, 1, 0, pattern(100, 2)));
            }
            CHECK(received(at, 1, 0, 100).bytes == pattern(100, 1));  // sent before the peer left
            const Outcome outcome = received(at, 1, 0, 10).outcome;
            CHECK(outcome.code == OutcomeCode::peer_lost && (outcome.left == std::vector<int>{1}));
            CHECK(sent(at, 1, 0, {}).code == OutcomeCode::peer_lost);
            CHECK(!at.messenger.failure());  // the other ranks continue without it
        });
    }
}

// Returns true if the messenger is done with the lane over this socket: the lane's last bytes are in flight, or the
// socket is closed.
bool is_finished(int descriptor) {
    constexpr int kFinWait1 = 4;
    tcp_info info{};
    socklen_t size = sizeof info;
    return getsockopt(descriptor, IPPROTO_TCP, TCP_INFO, &info, &size) != 0 || info.tcpi_state == kFinWait1;
}

// If frames arrive after a rank has closed its lane, the kernel responds with a reset. The reset must not arrive before
// the goodbye.
void a_goodbye_arrives_although_a_frame_crosses_it() {
    std::atomic<int> leaving = -1;
    with_ranks(2, 1, Over::tcp, [&](Rank at) {
        constexpr int kMany = 4;
        constexpr std::size_t kLong = 16 << 10;  // together more than the other end can buffer
        if (at.rank == 0) {
            for (int i = 0; i < kMany; ++i) CHECK(sent(at, 1, 0, pattern(kLong, i)).code == OutcomeCode::ok);
            leaving = at.lanes.peer(1).control->descriptor();
            return;
        }
        while (leaving < 0 || !is_finished(leaving)) pause(1);
        pause(50);  // an incorrect implementation would close its lane before the goodbye is delivered
        CallHeader header{};
        header.operation = Operation::barrier;
        header.sequence = 1;
        at.messenger.announce(header);
        for (int i = 0; i < kMany; ++i) CHECK(received(at, 0, 0, kLong).bytes == pattern(kLong, i));
        const Outcome outcome = received(at, 0, 0, 10).outcome;
        CHECK(outcome.code == OutcomeCode::peer_lost && (outcome.left == std::vector<int>{0}));
        CHECK(!at.messenger.failure());
    });
}

void a_close_ends_open_requests_and_reports_the_reason() {
    with_ranks(3, 1, Over::sockets, [](Rank at) {
        if (at.rank == 0) {
            Bytes bytes(10);
            const auto request = at.messenger.receive(1, 0, DType::u8, stream_of(bytes), kHung);
            at.messenger.run_in_background();
            pause(50);
            at.messenger.close();
            CHECK(request->done() && request->outcome().code == OutcomeCode::interrupted);
            at.messenger.close();
            return;
        }
        const Outcome outcome = received(at, 0, 0, 10).outcome;
        CHECK(outcome.code == OutcomeCode::interrupted && outcome.reporter == 0);
        CHECK(sent(at, 3 - at.rank, 0, {}).code == OutcomeCode::interrupted);  // the group is closed
    });
}

void a_close_while_another_thread_waits_ends_its_wait() {
    with_ranks(2, 1, Over::sockets, [](Rank at) {
        if (at.rank == 1) {
            CHECK(received(at, 0, 0, 10).outcome.code == OutcomeCode::interrupted);
            return;
        }
        std::atomic<bool> waits = false;
        std::thread waiter([&at, &waits] {
            const Outcome outcome = received(at, 1, 0, 10, kHung, records_that_it_waits(waits)).outcome;
            CHECK(outcome.code == OutcomeCode::interrupted);
        });
        while (!waits) pause(1);
        at.messenger.close();
        waiter.join();
    });
}

// A peer that computes for a long time does not read, so announcements to it must not accumulate on this rank.
void announcements_to_a_busy_rank_do_not_pile_up() {
    constexpr std::uint64_t kMany = 5'000;  // the socket can buffer a few hundred
    std::atomic<bool> announced = false;
    with_ranks(2, 1, Over::sockets, [&](Rank at) {
        if (at.rank == 1) {
            while (!announced) pause(1);
            wait_for_all(at);
            CHECK(at.messenger.announced()[0].sequence == kMany);
            return;
        }
        CallHeader header{};
        header.operation = Operation::barrier;
        while (header.sequence < kMany) {
            ++header.sequence;
            at.messenger.announce(header);
        }
        CHECK(at.messenger.queued(1) <= 2);
        announced = true;
        wait_for_all(at);
    });
}

void the_first_of_many_failures_is_kept() {
    with_ranks(4, 1, Over::sockets, [](Rank at) {
        Outcome mine;
        mine.code = OutcomeCode::timed_out;
        mine.missing = {at.rank};
        const Outcome stands = at.messenger.fail(mine);
        CHECK(stands.code == OutcomeCode::timed_out && stands.missing.size() == 1);
        for (int i = 0; i < 100; ++i) {
            Outcome other;
            other.code = OutcomeCode::peer_lost;
            CHECK(at.messenger.fail(other).missing == stands.missing);
            at.messenger.poll();
        }
        CHECK(received(at, (at.rank + 1) % 4, 0, 10).outcome.missing == stands.missing);
    });
}

// Frames that arrive after a failure are not read, so they must not keep a thread awake.
void a_failed_messenger_sleeps(Over over) {
    std::atomic<int> at_work = 0;
    with_ranks(2, 1, over, [&](Rank at) {
        Bytes bytes(10);
        if (at.rank == 1) {
            while (at_work < 1) pause(1);
            for (int i = 0; i < 20; ++i) static_cast<void>(at.messenger.send(0, 0, DType::u8, stream_of(bytes), kHung));
            at_work = 2;
            while (at_work < 3) pause(1);
            return;
        }
        at.messenger.run_in_background();
        const auto open = at.messenger.receive(1, 5, DType::u8, stream_of(bytes), kHung);
        Outcome mine;
        mine.code = OutcomeCode::timed_out;
        at.messenger.fail(mine);
        at_work = 1;
        while (at_work < 2) pause(1);
        const std::int64_t before_ns = record::nanoseconds_of(CLOCK_PROCESS_CPUTIME_ID);
        for (int i = 0; i < 30; ++i) {
            CHECK(at.messenger.wait(open, kHung, nullptr) &&
                  received(at, 1, 0, 10).outcome.code == OutcomeCode::timed_out);
            pause(10);
        }
        CHECK(record::nanoseconds_of(CLOCK_PROCESS_CPUTIME_ID) - before_ns < 150 * kMs);
        at_work = 3;
    });
}

void all() {
    for (const Over over : kinds()) messages_of_every_size_arrive_before_and_after_their_receive(over);
    messages_are_sent_between_lists_of_ranges();
    messages_match_by_tag_and_keep_their_order_within_it();
    a_receive_from_any_source_takes_each_message_once();
    for (const Over over : kinds()) a_receive_may_be_posted_while_its_message_arrives(over);
    a_message_that_does_not_fit_fails_alone();
    many_messages_may_be_outstanding_both_ways();
    unmatched_offers_are_bounded();
    threads_of_one_rank_may_wait_at_the_same_time();
    a_wait_can_be_interrupted_while_another_thread_drives();
    a_timeout_names_the_missing_rank_while_others_communicate();
    for (const Over over : kinds()) a_rank_that_left_is_distinguished_from_one_that_died(over);
    a_goodbye_arrives_although_a_frame_crosses_it();
    a_close_ends_open_requests_and_reports_the_reason();
    a_close_while_another_thread_waits_ends_its_wait();
    announcements_to_a_busy_rank_do_not_pile_up();
    the_first_of_many_failures_is_kept();
    for (const Over over : kinds()) a_failed_messenger_sleeps(over);
}

}  // namespace

int main() {
    ranks::plain_and_encrypted(all);
}
