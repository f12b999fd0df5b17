// An encrypted connection over a socket that it does not own. None of its functions waits.
//
// A session has one user at a time. It writes no alert when it ends: the transported frames show whether a stream is
// complete, and a forked process must not write into its parent's connections.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tls/identity.hpp"

namespace paceline::tls {

enum class Side { connecting, accepting };

// The socket from which OpenSSL reads and to which it writes.
struct Wire {
    int descriptor;
    bool ended = false;        // the peer has closed its end
    bool takes_all = false;    // bytes that the socket does not accept are kept and written before all others
    std::vector<char> kept{};  // at most a key update
};

class Session {
  public:
    // `socket` is non-blocking and outlives the session. Throws std::bad_alloc.
    Session(std::shared_ptr<const Identity> identity, int socket, Side side);
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
    ~Session();

    enum class Progress { done, wants_to_read, wants_to_write, failed };
    // Continues the handshake as far as possible. After a failure, `reason` is the cause, or empty if the connection
    // broke.
    Progress shake_hands();
    const std::string& reason() const { return reason_; }

    // Behave like send(2) and recv(2) on a non-blocking socket: they return -1 with EAGAIN if the other end must act
    // first. A write that returned EAGAIN must be repeated with the same bytes, possibly at a different address and
    // with more bytes after them. At most one record of 16 KiB is written or read.
    ssize_t send(const void* data, std::size_t nbytes);
    ssize_t recv(void* data, std::size_t nbytes);

    // Makes the session read more than one record from the socket at a time. The socket's readability then no longer
    // shows whether there is data to read: the user must read until EAGAIN.
    void read_ahead();

  private:
    ssize_t failed(int result);
    void count_record();

    const std::shared_ptr<const Identity> identity_;
    const Library& library_;
    Wire wire_;
    ssl_st* ssl_;
    std::uint64_t records_ = 0;  // the records written with the current key
    std::string reason_;
};

}  // namespace paceline::tls
