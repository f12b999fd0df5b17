// One encrypted connection, over a socket that belongs to somebody else. None of its functions waits.
//
// A session has one user at a time. It writes no alert when it ends: whether a stream is complete is said inside, by
// the frames that it carries, and a process that was forked must not write into its parent's connections.
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

// The socket as OpenSSL sees it.
struct Wire {
    int descriptor;
    bool ended = false;        // the peer has closed its end
    bool takes_all = false;    // what the socket does not take is kept, and written before anything else
    std::vector<char> kept{};  // at most a change of keys
};

class Session {
  public:
    // `socket` is non-blocking and outlives the session. Throws std::bad_alloc.
    Session(std::shared_ptr<const Identity> identity, int socket, Side side);
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
    ~Session();

    enum class Progress { done, wants_to_read, wants_to_write, failed };
    // Proceeds with the handshake as far as possible. After a failure `reason` says what was wrong; it is empty when
    // the connection broke off.
    Progress shake_hands();
    const std::string& reason() const { return reason_; }

    // As send(2) and recv(2) do on a non-blocking socket, with -1 and EAGAIN when the other end must act first. A write
    // that returned EAGAIN must be repeated with the same bytes, which may lie elsewhere by then; more may follow them.
    // At most one record of 16 KiB is written or read.
    ssize_t send(const void* data, std::size_t nbytes);
    ssize_t recv(void* data, std::size_t nbytes);

    // Reads more from the socket than one record, so that its readability no longer says whether there is something to
    // read: the user must read until EAGAIN.
    void read_ahead();

  private:
    ssize_t failed(int result);
    void count_record();

    const std::shared_ptr<const Identity> identity_;
    const Library& library_;
    Wire wire_;
    ssl_st* ssl_;
    std::uint64_t records_ = 0;  // written with the current key
    std::string reason_;
};

}  // namespace paceline::tls
