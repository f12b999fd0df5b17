// Encrypted connections for tests: pairs of sockets whose handshakes are complete.
#pragma once

#include <sys/socket.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <memory>
#include <utility>
#include <variant>

#include "check.hpp"
#include "tls/socket.hpp"

namespace encrypted {

using namespace paceline;

// Prints a message and returns true if this machine has no OpenSSL.
inline bool unavailable() {
    const auto* const why = std::get_if<std::string>(&tls::library());
    if (why != nullptr) std::fprintf(stderr, "not tested over encrypted connections: %s\n", why->c_str());
    return why != nullptr;
}

inline std::shared_ptr<const tls::Identity> identity_of(std::uint8_t job,
                                                        std::uint64_t records_per_key = tls::kRecordsPerKey) {
    std::array<std::uint8_t, tls::kSeedBytes> seed{};
    seed[0] = job;
    return std::make_shared<const tls::Identity>(seed, records_per_key);
}

// Encrypts the connection between `a` and `b`. Both descriptors are non-blocking.
inline void handshake(tls::Socket& a, tls::Socket& b, const std::shared_ptr<const tls::Identity>& identity) {
    a.session = std::make_unique<tls::Session>(identity, a.descriptor, tls::ConnectionRole::connecting);
    b.session = std::make_unique<tls::Session>(identity, b.descriptor, tls::ConnectionRole::accepting);
    bool of_a = false, of_b = false;
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (!(of_a && of_b) && std::chrono::steady_clock::now() < until) {
        of_a = of_a || a.session->handshake() == tls::Session::HandshakeResult::done;
        of_b = of_b || b.session->handshake() == tls::Session::HandshakeResult::done;
    }
    CHECK(of_a && of_b);
}

// Returns the two ends of an encrypted connection. The keys of the connection change often.
inline std::pair<tls::Socket, tls::Socket> joined() {
    static const std::shared_ptr<const tls::Identity> identity = identity_of(1, 100);
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
    tls::Socket a(ends[0]), b(ends[1]);
    handshake(a, b, identity);
    return {std::move(a), std::move(b)};
}

}  // namespace encrypted
