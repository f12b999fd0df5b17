// A connected stream socket and the session that encrypts it, if any. The owner must close the descriptor.
#pragma once

#include <sys/socket.h>

#include <memory>
#include <utility>

#include "tls/session.hpp"

namespace paceline::tls {

struct Socket {
    Socket(int fd = -1) : descriptor(fd) {}  // NOLINT: implicit, for unencrypted sockets
    Socket(int fd, std::unique_ptr<Session> over) : descriptor(fd), session(std::move(over)) {}

    // These functions behave like send(2) and recv(2), but never raise SIGPIPE; the descriptor is non-blocking.
    ssize_t send(const void* data, std::size_t nbytes) const {
        return session ? session->send(data, nbytes) : ::send(descriptor, data, nbytes, MSG_NOSIGNAL);
    }
    ssize_t recv(void* data, std::size_t nbytes) const {
        return session ? session->recv(data, nbytes) : ::recv(descriptor, data, nbytes, 0);
    }

    int descriptor;
    std::unique_ptr<Session> session;
};

}  // namespace paceline::tls
