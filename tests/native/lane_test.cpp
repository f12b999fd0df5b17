// Tests that bytes sent over a lane arrive unchanged and in order regardless of the sizes of the reads and writes, and
// that the end of the stream is reported after the last byte.
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <memory>
#include <thread>
#include <vector>

#include "check.hpp"
#include "encrypted.hpp"
#include "link/encrypted_lane.hpp"
#include "link/ring_lane.hpp"
#include "link/waiter.hpp"

namespace {

using namespace paceline;
using namespace paceline::link;

using Bytes = std::vector<std::uint8_t>;

// Limits that a test reaches only if it hangs, even if a sanitizer and other processes slow it down.
constexpr std::chrono::seconds kHung{60};
constexpr std::chrono::seconds kSoon{20};  // limit for operations that would otherwise end at `kHung`

ByteRange range(Bytes& bytes, std::size_t from, std::size_t nbytes) {
    return {bytes.data() + from, nbytes};
}

Bytes pattern(std::size_t nbytes) {
    Bytes bytes(nbytes);
    for (std::size_t i = 0; i < nbytes; ++i) bytes[i] = static_cast<std::uint8_t>(i * 31 + i / 251);
    return bytes;
}

// The two ends of a connection.
struct LanePair {
    virtual ~LanePair() = default;
    std::unique_ptr<Lane> a, b;
};

struct SocketLanePair final : LanePair {
    SocketLanePair() {
        int ends[2];
        CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
        a = std::make_unique<SocketLane>(ends[0]);
        b = std::make_unique<SocketLane>(ends[1]);
    }
};

struct EncryptedLanePair final : LanePair {
    EncryptedLanePair() {
        auto [first, second] = encrypted::joined();
        a = make_lane(std::move(first));
        b = make_lane(std::move(second));
    }
};

constexpr std::size_t kRingBytes = 256 << 10;

struct RingStorage {
    RingCounters counters;
    Bytes bytes = Bytes(kRingBytes);
    Ring ring() { return {&counters, bytes.data(), bytes.size()}; }
};

// Two rings between a and b. Each end wakes the waiter of the other end.
struct RingLanePair final : LanePair {
    RingLanePair() {
        a = std::make_unique<RingLane>(
            there.ring(), back.ring(), [this] { of_b.wake(); }, [this] { return a_sees_b_gone.load(); });
        b = std::make_unique<RingLane>(
            back.ring(), there.ring(), [this] { of_a.wake(); }, [this] { return b_sees_a_gone.load(); });
    }
    RingStorage there, back;
    Waiter of_a, of_b;
    std::atomic<bool> a_sees_b_gone{false}, b_sees_a_gone{false};
    ~RingLanePair() override {
        a.reset();
        b.reset();
    }
};

// Tests that run over several kinds of lane have a `Connect` parameter. They are not templates, so that the compiler
// reports unused tests.
using Connect = std::unique_ptr<LanePair> (*)();

std::unique_ptr<LanePair> by_sockets() {
    return std::make_unique<SocketLanePair>();
}

std::unique_ptr<LanePair> by_encrypted_sockets() {
    return std::make_unique<EncryptedLanePair>();
}

std::unique_ptr<LanePair> by_rings() {
    return std::make_unique<RingLanePair>();
}

// Alternates writes and reads of odd sizes until everything has been transferred.
void transfer_alternately(Lane& from, Lane& to, std::size_t most_written, std::size_t most_read) {
    Bytes sent = pattern(1'000'003);
    Bytes received(sent.size());
    std::size_t written = 0;
    std::size_t read = 0;
    while (read < sent.size()) {
        const std::size_t n = std::min(most_written, sent.size() - written);
        const ByteRange out[] = {range(sent, written, n / 3), range(sent, written + n / 3, n - n / 3)};
        const std::ptrdiff_t took = from.write(out);
        CHECK(took >= 0);
        written += static_cast<std::size_t>(took);
        const std::size_t m = std::min(most_read, received.size() - read);
        const ByteRange in[] = {range(received, read, m / 5), range(received, read + m / 5, m - m / 5)};
        const std::ptrdiff_t got = to.read(in);
        CHECK(got >= 0);
        read += static_cast<std::size_t>(got);
    }
    CHECK(received == sent);
}

void bytes_arrive_in_order_whatever_the_sizes(Connect connect) {
    const std::pair<std::size_t, std::size_t> sizes[] = {{64, 64}, {1 << 20, 1 << 20}, {100'000, 48}, {77, 333'333}};
    for (const auto& [most_written, most_read] : sizes) {
        const std::unique_ptr<LanePair> pair = connect();
        transfer_alternately(*pair->a, *pair->b, most_written, most_read);
        transfer_alternately(*pair->b, *pair->a, most_read, most_written);
    }
}

void a_write_of_too_many_ranges_is_partial(Connect connect) {
    const std::unique_ptr<LanePair> pair = connect();
    Bytes sent = pattern(1000);
    std::vector<ByteRange> many;
    for (std::size_t i = 0; i < sent.size(); ++i) many.push_back(range(sent, i, 1));
    std::size_t written = 0;
    while (written < sent.size()) written += static_cast<std::size_t>(pair->a->write(std::span(many).subspan(written)));
    Bytes received(sent.size());
    std::vector<ByteRange> into;
    for (std::size_t i = 0; i < received.size(); ++i) into.push_back(range(received, i, 1));
    std::size_t read = 0;
    while (read < received.size()) {
        const std::ptrdiff_t n = pair->b->read(std::span(into).subspan(read));
        CHECK(n > 0);
        read += static_cast<std::size_t>(n);
    }
    CHECK(received == sent);
}

void a_full_lane_takes_nothing_and_an_empty_one_gives_nothing(Connect connect) {
    const std::unique_ptr<LanePair> pair = connect();
    Bytes bytes(4 << 20);
    const ByteRange all = range(bytes, 0, bytes.size());
    std::size_t held = 0;
    for (std::ptrdiff_t n = 1; n != 0; held += static_cast<std::size_t>(n)) CHECK((n = pair->a->write({&all, 1})) >= 0);
    CHECK(held > 0 && held < bytes.size());
    std::size_t read = 0;
    while (read < held) {
        const std::ptrdiff_t n = pair->b->read({&all, 1});
        CHECK(n >= 0);
        read += static_cast<std::size_t>(n);
        if (n != 0) continue;
        const ByteRange last = range(bytes, 0, 1);  // completes a record of which the socket accepted only a part
        CHECK(pair->a->write({&last, 1}) == 1);
        ++held;
    }
    CHECK(read == held && pair->b->read({&all, 1}) == 0);
    CHECK(pair->a->write({&all, 1}) > 0);
}

void bytes_sent_before_the_end_are_read_before_it(Connect connect) {
    const std::unique_ptr<LanePair> pair = connect();
    Bytes sent = pattern(40'000);
    const ByteRange out = range(sent, 0, sent.size());
    CHECK(pair->a->write({&out, 1}) == 40'000);
    pair->a->finish();
    Bytes received(50'000);
    std::size_t read = 0;
    for (;;) {
        const ByteRange in = range(received, read, std::min<std::size_t>(7'000, received.size() - read));
        const std::ptrdiff_t n = pair->b->read({&in, 1});
        if (n == kClosed) break;
        CHECK(n > 0);
        read += static_cast<std::size_t>(n);
    }
    received.resize(read);
    CHECK(received == sent);
    const ByteRange back = range(sent, 0, 10);
    CHECK(pair->b->read({&back, 1}) == kClosed);  // reading again has the same result
}

void a_socket_closed_with_unread_bytes_still_delivers(Connect connect) {
    const std::unique_ptr<LanePair> both = connect();
    LanePair& pair = *both;
    Bytes bytes = pattern(100);
    const ByteRange out = range(bytes, 0, 100);
    CHECK(pair.b->write({&out, 1}) == 100);  // lane a never reads these bytes
    CHECK(pair.a->write({&out, 1}) == 100);
    pair.a.reset();
    Bytes received(100);
    const ByteRange in = range(received, 0, 100);
    CHECK(pair.b->read({&in, 1}) == 100);
    CHECK(received == bytes);
    CHECK(pair.b->read({&in, 1}) == kClosed);
    CHECK(pair.b->write({&out, 1}) == kClosed);
}

// Bytes that the peer sent before it exited can still be read after a write to it has failed.
void a_failed_write_does_not_end_reading(Connect connect) {
    const std::unique_ptr<LanePair> pair = connect();
    Bytes bytes = pattern(50'000);
    const ByteRange all = range(bytes, 0, bytes.size());
    CHECK(pair->a->write({&all, 1}) == 50'000);
    pair->a.reset();
    while (pair->b->write({&all, 1}) != kClosed) {
    }
    Bytes received(bytes.size());
    const ByteRange in = range(received, 0, received.size());
    CHECK(pair->b->read({&in, 1}) == 50'000 && received == bytes);
    CHECK(pair->b->read({&in, 1}) == kClosed);
}

// If the socket accepts only part of a record, the caller passes the last byte again, regardless of the data after it.
void what_was_begun_is_finished_before_anything_else() {
    EncryptedLanePair pair;
    Bytes sent;
    Bytes word = pattern(30'000);
    std::ptrdiff_t n = 1;
    while (n > 0) {
        const ByteRange out = range(word, 0, word.size());
        n = pair.a->write({&out, 1});
        CHECK(n >= 0);
        sent.insert(sent.end(), word.begin(), word.begin() + n);
        if (static_cast<std::size_t>(n) < word.size()) break;
    }
    Bytes rest(word.begin() + n, word.end());
    std::size_t read = 0, written = 0;
    Bytes received(sent.size() + rest.size());
    while (read < received.size()) {
        const ByteRange out = range(rest, written, rest.size() - written);
        written += static_cast<std::size_t>(pair.a->write({&out, 1}));
        const ByteRange in = range(received, read, std::min<std::size_t>(9'000, received.size() - read));
        read += static_cast<std::size_t>(pair.b->read({&in, 1}));
    }
    sent.insert(sent.end(), rest.begin(), rest.end());
    CHECK(received == sent);
}

// A reader must not sleep while its session still contains bytes.
void bytes_that_were_read_ahead_keep_a_reader_awake() {
    EncryptedLanePair pair;
    Bytes bytes = pattern(100);
    const ByteRange out = range(bytes, 0, 100), in = range(bytes, 0, 60);
    CHECK(pair.a->write({&out, 1}) == 100);
    CHECK(pair.b->read({&in, 1}) == 60 && pair.b->arm());
    CHECK(pair.b->read({&in, 1}) == 40 && !pair.b->arm());
}

void a_socket_closes_although_its_peer_never_stops_sending() {
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    auto lane = std::make_unique<SocketLane>(ends[0]);
    std::thread flood([fd = ends[1]] {
        const Bytes bytes(64 << 10);
        while (send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL) > 0) {
        }
    });
    const auto started = std::chrono::steady_clock::now();
    lane.reset();
    CHECK(std::chrono::steady_clock::now() - started < kSoon);
    flood.join();
    ::close(ends[1]);
}

void a_forked_child_holds_no_socket_open(Connect connect) {
    const std::unique_ptr<LanePair> both = connect();
    LanePair& pair = *both;
    const pid_t child = fork();
    if (child == 0) {
        pause();
        _exit(0);
    }
    Bytes bytes = pattern(100);
    const ByteRange out = range(bytes, 0, 100);
    CHECK(pair.a->write({&out, 1}) == 100);  // the parent's end still works
    pair.a.reset();
    Bytes received(100);
    const ByteRange in = range(received, 0, 100);
    CHECK(pair.b->read({&in, 1}) == 100);
    const auto started = std::chrono::steady_clock::now();
    while (pair.b->read({&in, 1}) != kClosed)  // the child may not have run yet
        CHECK(std::chrono::steady_clock::now() - started < kSoon);
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
}

void a_read_without_ranges_reports_the_end_of_a_rings_peer() {
    RingLanePair pair;
    CHECK(pair.b->read({}) == 0);
    pair.a->finish();
    CHECK(pair.b->read({}) == kClosed);
    // A peer that has finished writing has also stopped reading.
    Bytes bytes(kRingBytes);
    const ByteRange out = range(bytes, 0, bytes.size());
    CHECK(pair.b->write({&out, 1}) == static_cast<std::ptrdiff_t>(kRingBytes));
    CHECK(pair.b->write({&out, 1}) == kClosed);

    RingLanePair other;
    other.b_sees_a_gone = true;
    CHECK(other.b->read({}) == kClosed);
}

void a_peek_shows_what_a_read_would_return() {
    RingLanePair pair;
    Bytes sent = pattern(kRingBytes);
    ByteRange out = range(sent, 0, kRingBytes / 2 + 64);
    CHECK(pair.a->write({&out, 1}) == static_cast<std::ptrdiff_t>(kRingBytes / 2 + 64));
    pair.b->consume(kRingBytes / 2);
    CHECK(pair.b->peek().size() == 64);
    out = range(sent, 0, kRingBytes - 64);
    CHECK(pair.a->write({&out, 1}) == static_cast<std::ptrdiff_t>(kRingBytes - 64));
    CHECK(pair.b->peek().size() == kRingBytes / 2);  // up to the end of the ring
    CHECK(pair.b->peek()[0] == sent[kRingBytes / 2]);
    pair.b->consume(kRingBytes / 2);
    CHECK(pair.b->peek().size() == kRingBytes / 2 && pair.b->peek()[0] == sent[kRingBytes / 2 - 64]);
}

// A corrupt peer may write any number as head or tail, but all accesses must stay within the ring.
void corrupt_counts_in_a_ring_do_no_harm() {
    for (const std::uint64_t sense :
         {std::uint64_t{1}, ~std::uint64_t{0}, std::uint64_t{1} << 63, kRingBytes * 3 + 5}) {
        auto pair = std::make_unique<RingLanePair>();
        Bytes bytes(600'000);
        const ByteRange all = range(bytes, 0, bytes.size());
        pair->there.counters.tail.store(sense);
        static_cast<void>(pair->a->write({&all, 1}));
        pair->there.counters.head.store(sense * 7);
        static_cast<void>(pair->b->read({&all, 1}));
        static_cast<void>(pair->b->peek());
        static_cast<void>(pair->a->arm());
    }
}

// Both sides sleep with a very long timeout, so a lost wake-up makes the test time out.
void an_armed_sleeper_is_woken() {
    const auto pair = std::make_unique<RingLanePair>();
    const auto started = std::chrono::steady_clock::now();
    constexpr std::size_t kTotal = 8 << 20;
    std::thread writer([&] {
        Bytes bytes = pattern(kRingBytes + 192);
        std::size_t written = 0;
        for (std::size_t round = 0; written < kTotal; ++round) {
            const std::size_t n = std::min((round % 7 == 0 ? bytes.size() : 64 * (round % 50 + 1)), kTotal - written);
            const ByteRange out = range(bytes, 0, n);
            const std::ptrdiff_t took = pair->a->write({&out, 1});
            written += static_cast<std::size_t>(took);
            if (static_cast<std::size_t>(took) < n && !pair->a->arm()) pair->of_a.sleep(kHung);
        }
    });
    Bytes bytes(kRingBytes);
    for (std::size_t read = 0, round = 0; read < kTotal; ++round) {
        const ByteRange in = range(bytes, 0, round % 5 == 0 ? bytes.size() : 64 * (round % 90 + 1));
        const std::ptrdiff_t n = pair->b->read({&in, 1});
        CHECK(n >= 0);
        read += static_cast<std::size_t>(n);
        if (n == 0 && !pair->b->arm()) pair->of_b.sleep(kHung);
    }
    writer.join();
    CHECK(std::chrono::steady_clock::now() - started < kHung);
}

void all_of_sockets(Connect connect) {
    bytes_arrive_in_order_whatever_the_sizes(connect);
    a_write_of_too_many_ranges_is_partial(connect);
    a_full_lane_takes_nothing_and_an_empty_one_gives_nothing(connect);
    bytes_sent_before_the_end_are_read_before_it(connect);
    a_socket_closed_with_unread_bytes_still_delivers(connect);
    a_failed_write_does_not_end_reading(connect);
    a_forked_child_holds_no_socket_open(connect);
}

}  // namespace

int main() {
    all_of_sockets(by_sockets);
    if (!encrypted::unavailable()) {
        all_of_sockets(by_encrypted_sockets);
        what_was_begun_is_finished_before_anything_else();
        bytes_that_were_read_ahead_keep_a_reader_awake();
    }
    bytes_arrive_in_order_whatever_the_sizes(by_rings);
    a_write_of_too_many_ranges_is_partial(by_rings);
    a_full_lane_takes_nothing_and_an_empty_one_gives_nothing(by_rings);
    bytes_sent_before_the_end_are_read_before_it(by_rings);
    a_socket_closes_although_its_peer_never_stops_sending();
    a_read_without_ranges_reports_the_end_of_a_rings_peer();
    a_peek_shows_what_a_read_would_return();
    corrupt_counts_in_a_ring_do_no_harm();
    an_armed_sleeper_is_woken();
}
