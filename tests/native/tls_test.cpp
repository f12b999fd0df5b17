// Tests that encrypted connections accept only the right peers, transfer bytes, and detect a modified stream.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <thread>
#include <vector>

#include "check.hpp"
#include "encrypted.hpp"
#include "tls/session.hpp"

namespace {

using namespace paceline::tls;
using encrypted::identity_of;

using Bytes = std::vector<std::uint8_t>;
using HandshakeResult = Session::HandshakeResult;

struct SessionPair {
    SessionPair(std::shared_ptr<const Identity> mine, std::shared_ptr<const Identity> theirs) {
        CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
        a = std::make_unique<Session>(std::move(mine), ends[0], ConnectionRole::connecting);
        b = std::make_unique<Session>(std::move(theirs), ends[1], ConnectionRole::accepting);
    }
    ~SessionPair() {
        a.reset();
        b.reset();
        close(ends[0]);
        close(ends[1]);
    }
    // Returns the results of both sides' handshakes.
    std::pair<HandshakeResult, HandshakeResult> meet() {
        HandshakeResult of_a = HandshakeResult::wants_to_read, of_b = HandshakeResult::wants_to_read;
        for (int round = 0; round < 10; ++round) {
            if (of_a != HandshakeResult::failed && of_a != HandshakeResult::done) of_a = a->handshake();
            if (of_b != HandshakeResult::failed && of_b != HandshakeResult::done) of_b = b->handshake();
        }
        return {of_a, of_b};
    }
    int ends[2];
    std::unique_ptr<Session> a, b;
};

Bytes pattern(std::size_t nbytes) {
    Bytes bytes(nbytes);
    for (std::size_t i = 0; i < nbytes; ++i) bytes[i] = static_cast<std::uint8_t>(i * 31 + i / 251);
    return bytes;
}

// Sends all bytes from one session to the other; returns the received bytes.
Bytes passed(Session& from, Session& to, const Bytes& sent) {
    Bytes received(sent.size());
    std::size_t written = 0, read = 0;
    while (read < sent.size()) {
        if (written < sent.size()) {
            const ssize_t n = from.send(sent.data() + written, sent.size() - written);
            CHECK(n > 0 || errno == EAGAIN);
            written += static_cast<std::size_t>(std::max<ssize_t>(n, 0));
        }
        const ssize_t n = to.recv(received.data() + read, received.size() - read);
        CHECK(n > 0 || (n < 0 && errno == EAGAIN));
        read += static_cast<std::size_t>(std::max<ssize_t>(n, 0));
    }
    return received;
}

void both_sides_make_the_same_certificate() {
    CHECK(identity_of(1)->certificate() == identity_of(1)->certificate());
    CHECK(identity_of(1)->certificate() != identity_of(2)->certificate());
}

void members_of_a_job_connect_and_bytes_arrive() {
    SessionPair pair(identity_of(1), identity_of(1));
    CHECK((pair.meet() == std::pair{HandshakeResult::done, HandshakeResult::done}));
    const Bytes sent = pattern(3'000'001);
    CHECK(passed(*pair.a, *pair.b, sent) == sent);
    CHECK(passed(*pair.b, *pair.a, sent) == sent);
}

void another_jobs_certificate_is_refused_by_both_sides() {
    SessionPair pair(identity_of(1), identity_of(2));
    const auto [of_a, of_b] = pair.meet();
    CHECK(of_a == HandshakeResult::failed && of_b == HandshakeResult::failed);
    CHECK(pair.a->reason().find("certificate verify failed") != std::string::npos);
}

// In both directions, the key changes every three records.
void bytes_arrive_while_the_keys_change() {
    SessionPair pair(identity_of(1, 3), identity_of(1, 3));
    CHECK((pair.meet() == std::pair{HandshakeResult::done, HandshakeResult::done}));
    const Bytes sent = pattern(1'500'000);
    for (int round = 0; round < 2; ++round) {
        CHECK(passed(*pair.a, *pair.b, sent) == sent);
        CHECK(passed(*pair.b, *pair.a, sent) == sent);
    }
}

// Each side fills the other side's socket. In some rounds, this happens just when a key update is due. The bytes that
// have arrived must still be readable, because otherwise neither side would ever free space in its socket.
void a_key_update_to_a_full_socket_does_not_stop_reading() {
    for (const std::uint64_t records_per_key : {1, 2, 3, 4, 5}) {
        SessionPair pair(identity_of(1, records_per_key), identity_of(1, records_per_key));
        CHECK((pair.meet() == std::pair{HandshakeResult::done, HandshakeResult::done}));
        int sent[] = {0, 0};
        Session* const sides[] = {pair.a.get(), pair.b.get()};
        const auto fill = [&](int side) {
            for (std::uint8_t byte = 0; sides[side]->send(&byte, 1) == 1; ++sent[side])
                byte = static_cast<std::uint8_t>(sent[side] + 1);
            CHECK(errno == EAGAIN);
        };
        fill(0);
        fill(1);
        for (int side = 0; side < 2; ++side) {
            std::uint8_t byte = 0;
            for (int i = 0; i < sent[1 - side]; ++i)
                CHECK(sides[side]->recv(&byte, 1) == 1 && byte == static_cast<std::uint8_t>(i));
            CHECK(sides[side]->recv(&byte, 1) == -1 && errno == EAGAIN);
        }
    }
}

// The last bytes that a rank sent can be read after its socket has stopped accepting data. This is true even if a key
// update fails for this reason, although OpenSSL does not read until a key update is written.
void a_key_update_to_a_closed_socket_does_not_stop_reading() {
    const auto identity = identity_of(1, 1);  // the keys change after each record
    const Bytes last = pattern(100);
    for (int round = 0; round < 60;
         ++round) {  // in about a third of the rounds, the socket is shut down just before a key update
        SessionPair pair(identity, identity);
        CHECK((pair.meet() == std::pair(HandshakeResult::done, HandshakeResult::done)));
        CHECK(pair.a->send(last.data(), last.size()) == static_cast<ssize_t>(last.size()));
        std::thread leaver([&pair, round] {
            std::uint8_t byte = 0;
            for (int have = 0; have < 5 + round;) have += pair.a->recv(&byte, 1) > 0 ? 1 : 0;
            shutdown(pair.ends[0], SHUT_RD);
        });
        const std::uint8_t byte = 1;
        while (pair.b->send(&byte, 1) > 0 || errno == EAGAIN) {
        }
        leaver.join();
        Bytes received(last.size());
        CHECK(pair.b->recv(received.data(), received.size()) == static_cast<ssize_t>(last.size()));
        CHECK(received == last);
    }
}

void a_peer_without_tls_is_refused() {
    SessionPair pair(identity_of(1), identity_of(1));
    const char plain[] = "paceln/1 and what else a peer without encryption would say";
    CHECK(send(pair.ends[0], plain, sizeof plain, MSG_NOSIGNAL) > 0);
    CHECK(pair.b->handshake() == HandshakeResult::failed);
    CHECK(!pair.b->reason().empty());
}

void an_orderly_end_is_distinguished_from_a_broken_connection() {
    SessionPair pair(identity_of(1), identity_of(1));
    CHECK((pair.meet() == std::pair{HandshakeResult::done, HandshakeResult::done}));
    std::uint8_t byte = 7;
    CHECK(pair.a->send(&byte, 1) == 1);
    shutdown(pair.ends[0], SHUT_WR);
    CHECK(pair.b->recv(&byte, 1) == 1 && pair.b->recv(&byte, 1) == 0);
}

// Applies `change` to the encrypted bytes that one side has written; returns the result of the other side's read.
ssize_t read_after(const std::function<void(Bytes&)>& change) {
    SessionPair pair(identity_of(1), identity_of(1));
    CHECK((pair.meet() == std::pair{HandshakeResult::done, HandshakeResult::done}));
    const Bytes sent = pattern(100);
    CHECK(pair.a->send(sent.data(), sent.size()) == 100);
    Bytes wire(4096);
    const ssize_t n = recv(pair.ends[1], wire.data(), wire.size(), MSG_DONTWAIT);
    CHECK(n > 100);
    wire.resize(static_cast<std::size_t>(n));
    CHECK(std::search(wire.begin(), wire.end(), sent.begin(), sent.begin() + 8) == wire.end());
    change(wire);
    CHECK(send(pair.ends[0], wire.data(), wire.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(wire.size()));
    Bytes received(100);
    return pair.b->recv(received.data(), received.size());
}

void a_changed_byte_is_never_taken_for_data() {
    CHECK(read_after([](Bytes&) {}) == 100);
    for (std::size_t at = 0; at < 120; ++at)
        CHECK(read_after([at](Bytes& wire) { wire[at] = static_cast<std::uint8_t>(wire[at] ^ (1U << (at % 8))); }) <=
              0);
}

void a_repeated_record_is_refused() {
    const auto twice = [](Bytes& wire) {
        const Bytes once = wire;
        wire.insert(wire.end(), once.begin(), once.end());
    };
    CHECK(read_after(twice) == 100);
    SessionPair pair(identity_of(1), identity_of(1));
    CHECK((pair.meet() == std::pair{HandshakeResult::done, HandshakeResult::done}));
    std::uint8_t byte = 7;
    Bytes wire(4096);
    CHECK(pair.a->send(&byte, 1) == 1);
    const ssize_t n = recv(pair.ends[1], wire.data(), wire.size(), MSG_DONTWAIT);
    for (int round = 0; round < 2; ++round) CHECK(send(pair.ends[0], wire.data(), static_cast<std::size_t>(n), 0) == n);
    CHECK(pair.b->recv(&byte, 1) == 1 && pair.b->recv(&byte, 1) == -1 && errno == ECONNRESET);
}

void a_gone_peer_raises_no_signal() {
    SessionPair pair(identity_of(1), identity_of(1));
    CHECK((pair.meet() == std::pair{HandshakeResult::done, HandshakeResult::done}));
    close(pair.ends[1]);
    pair.ends[1] = -1;
    const Bytes bytes = pattern(100);
    CHECK(pair.a->send(bytes.data(), bytes.size()) == -1 && errno == ECONNRESET);
}

void the_library_is_searched_where_the_process_has_mapped_it() {
    const std::string maps =
        "7f00-7f01 r-xp 00000000 08:01 11 /opt/python/lib/libcrypto.so.3\n"
        "7f02-7f03 r-xp 00000000 08:01 12 /opt/conda/lib/libssl.so.3\n"
        "7f04-7f05 r-xp 00000000 08:01 13 /x/psycopg.libs/libssl-81ffa89e.so.1.1\n"
        "7f06-7f07 rw-p 00000000 00:00 0\n";
    const auto places = libssl_paths(maps);
    CHECK(places.size() == 5);
    CHECK(places[0] == "/opt/conda/lib/libssl.so.3" && places[1] == "/opt/python/lib/libssl.so.3");
    CHECK(places[2] == "libssl.so.3");
}

void a_machine_without_openssl_raises_an_error() {
    const auto found = load({"/nowhere/libssl.so.3", "libc.so.6"});
    const auto* const said = std::get_if<std::string>(&found);
    CHECK(said != nullptr);
    CHECK(said->find("need OpenSSL") != std::string::npos);
    CHECK(said->find("tried /nowhere/libssl.so.3, libc.so.6 (which lacks functions)") != std::string::npos);
}

}  // namespace

int main() {
    the_library_is_searched_where_the_process_has_mapped_it();
    a_machine_without_openssl_raises_an_error();
    if (encrypted::unavailable()) return 0;
    both_sides_make_the_same_certificate();
    members_of_a_job_connect_and_bytes_arrive();
    another_jobs_certificate_is_refused_by_both_sides();
    bytes_arrive_while_the_keys_change();
    a_key_update_to_a_full_socket_does_not_stop_reading();
    a_key_update_to_a_closed_socket_does_not_stop_reading();
    a_peer_without_tls_is_refused();
    an_orderly_end_is_distinguished_from_a_broken_connection();
    a_changed_byte_is_never_taken_for_data();
    a_repeated_record_is_refused();
    a_gone_peer_raises_no_signal();
}
