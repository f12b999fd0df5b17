// An encrypted connection over a socket that it does not own. All functions are non-blocking.
//
// Not thread-safe. A session does not write an alert when it is destroyed: the transported frames show whether a stream
// is complete, and a forked process must not write to its parent's connections.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tls/identity.hpp"

namespace paceline::tls {

enum class ConnectionRole { connecting, accepting };

// The socket and its state, as used by OpenSSL.
struct BioSocket {
    int descriptor;
    bool ended = false;        // the peer has closed the connection
    bool takes_all = false;    // whether to buffer in `kept` the bytes that the socket does not accept
    std::vector<char> kept{};  // at most a key update
};

class Session {
  public:
    // `socket` is non-blocking and outlives the session. Throws std::bad_alloc.
    Session(std::shared_ptr<const Identity> identity, int socket, ConnectionRole side);
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
    ~Session();

    enum class HandshakeResult { done, wants_to_read, wants_to_write, failed };
    // Continues the handshake as far as possible. After a failure, `reason` returns the cause, or an empty string if
    // the connection was lost.
    HandshakeResult handshake();
    const std::string& reason() const { return reason_; }

    // Like send(2) and recv(2) on a non-blocking socket, these functions return -1 with EAGAIN if they cannot proceed
    // until the peer sends or receives data. A write that returned EAGAIN must be repeated with the same bytes,
    // possibly at a different address and with more bytes after them. At most one record of 16 KiB is written or read.
    ssize_t send(const void* data, std::size_t nbytes);
    ssize_t recv(void* data, std::size_t nbytes);

    // Allows the session to read several records from the socket at a time. The session may then contain data while the
    // socket is not readable, so the caller must read until EAGAIN.
    void read_ahead();

  private:
    ssize_t failed(int result);
    void count_record();

    const std::shared_ptr<const Identity> identity_;
    const Library& library_;
    BioSocket wire_;
    ssl_st* ssl_;
    std::uint64_t records_ = 0;  // number of records written with the current key
    std::string reason_;
};

}  // namespace paceline::tls
