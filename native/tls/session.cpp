#include "tls/session.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <utility>

namespace paceline::tls {
namespace {

// OpenSSL's error codes.
constexpr int kWantRead = 2, kWantWrite = 3, kEnded = 6;
constexpr int kRetryRead = 0x01 | 0x08, kRetryWrite = 0x02 | 0x08, kRetries = 0x0F;
constexpr int kFlush = 11, kIsAtEnd = 2;
constexpr int kSourceSink = 0x0400 | 127;  // BIO_TYPE_SOURCE_SINK with an index that OpenSSL itself does not use
constexpr int kNoUpdateRequested = 0;
constexpr std::size_t kRecordBytes = 16 << 10;

// BIO functions for the socket. OpenSSL's own would raise SIGPIPE after the peer has closed the connection.

const Library& loaded() {
    return *std::get<const Library*>(library());
}

BioSocket& wire_of(bio_st* bio) {
    return *static_cast<BioSocket*>(loaded().BIO_get_data(bio));
}

bool would_block() {
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

int read_socket(bio_st* bio, char* data, int nbytes) {
    loaded().BIO_clear_flags(bio, kRetries);
    BioSocket& wire = wire_of(bio);
    const ssize_t got = ::recv(wire.descriptor, data, static_cast<std::size_t>(nbytes), MSG_DONTWAIT);
    if (got < 0 && would_block()) loaded().BIO_set_flags(bio, kRetryRead);
    wire.ended = got == 0;
    return static_cast<int>(got);
}

ssize_t write_now(const BioSocket& wire, const char* data, std::size_t nbytes) {
    return ::send(wire.descriptor, data, nbytes, MSG_DONTWAIT | MSG_NOSIGNAL);
}

// Writes the kept bytes; returns true once the socket has accepted all of them, or false with errno set.
bool flush(BioSocket& wire) {
    while (!wire.kept.empty()) {
        const ssize_t sent = write_now(wire, wire.kept.data(), wire.kept.size());
        if (sent < 0) return false;
        wire.kept.erase(wire.kept.begin(), wire.kept.begin() + sent);
    }
    return true;
}

int write_socket(bio_st* bio, const char* data, int nbytes) {
    loaded().BIO_clear_flags(bio, kRetries);
    BioSocket& wire = wire_of(bio);
    const ssize_t sent = flush(wire) ? write_now(wire, data, static_cast<std::size_t>(nbytes)) : -1;
    // A key update that cannot be written must not end the session, because received data may still be unread. Writing
    // the next record detects a broken socket.
    if (wire.takes_all) {
        wire.kept.insert(wire.kept.end(), data + std::max<ssize_t>(sent, 0), data + nbytes);
        return nbytes;
    }
    if (sent < 0 && would_block()) loaded().BIO_set_flags(bio, kRetryWrite);
    return static_cast<int>(sent);
}

long control_socket(bio_st* bio, int command, long, void*) {
    return command == kFlush || (command == kIsAtEnd && wire_of(bio).ended) ? 1 : 0;
}

const bio_method_st* socket_method() {
    static const bio_method_st* const method = []() -> const bio_method_st* {
        bio_method_st* const made = loaded().BIO_meth_new(kSourceSink, "paceline socket");
        if (made == nullptr) return nullptr;
        loaded().BIO_meth_set_read(made, &read_socket);
        loaded().BIO_meth_set_write(made, &write_socket);
        loaded().BIO_meth_set_ctrl(made, &control_socket);
        return made;
    }();
    return method;
}

}  // namespace

Session::Session(std::shared_ptr<const Identity> identity, int socket, ConnectionRole side)
    : identity_(std::move(identity)),
      library_(identity_->library()),
      wire_{.descriptor = socket},
      ssl_(library_.SSL_new(identity_->context())) {
    const bio_method_st* const method = socket_method();
    bio_st* const bio = ssl_ != nullptr && method != nullptr ? library_.BIO_new(method) : nullptr;
    if (bio == nullptr) {
        library_.SSL_free(ssl_);
        throw std::bad_alloc();
    }
    library_.BIO_set_data(bio, &wire_);
    library_.BIO_set_init(bio, 1);
    library_.SSL_set_bio(ssl_, bio, bio);  // the session owns `bio` now
    if (side == ConnectionRole::connecting)
        library_.SSL_set_connect_state(ssl_);
    else
        library_.SSL_set_accept_state(ssl_);
}

Session::~Session() {
    library_.SSL_free(ssl_);
}

Session::HandshakeResult Session::handshake() {
    library_.ERR_clear_error();
    const int result = library_.SSL_do_handshake(ssl_);
    if (result == 1) return HandshakeResult::done;
    switch (library_.SSL_get_error(ssl_, result)) {
        case kWantRead:
            return HandshakeResult::wants_to_read;
        case kWantWrite:
            return HandshakeResult::wants_to_write;
        default:
            reason_ = wire_.ended ? "" : library_.take_error_message();
            return HandshakeResult::failed;
    }
}

ssize_t Session::send(const void* data, std::size_t nbytes) {
    library_.ERR_clear_error();
    const int sent = library_.SSL_write(ssl_, data, static_cast<int>(std::min(nbytes, kRecordBytes)));
    if (sent <= 0) {
        if (failed(sent) == 0) errno = ECONNRESET;  // a closed stream is an error for a writer
        return -1;
    }
    count_record();
    return sent;
}

ssize_t Session::recv(void* data, std::size_t nbytes) {
    library_.ERR_clear_error();
    const int got = library_.SSL_read(ssl_, data, static_cast<int>(std::min(nbytes, kRecordBytes)));
    return got > 0 ? got : failed(got);
}

ssize_t Session::failed(int result) {
    switch (library_.SSL_get_error(ssl_, result)) {
        case kWantRead:
        case kWantWrite:
            errno = EAGAIN;
            return -1;
        case kEnded:
            return 0;
        default:
            reason_ = library_.take_error_message();
            errno = ECONNRESET;
            return -1;
    }
}

// OpenSSL does not read until the key update is written. This could deadlock if both sides' sockets are full. The wire
// therefore buffers the update and writes it to the socket before the next record.
void Session::count_record() {
    if (++records_ < identity_->records_per_key()) return;
    library_.SSL_key_update(ssl_, kNoUpdateRequested);
    wire_.takes_all = true;
    library_.SSL_do_handshake(ssl_);
    wire_.takes_all = false;
    records_ = 0;
}

void Session::read_ahead() {
    library_.SSL_set_read_ahead(ssl_, 1);
}

}  // namespace paceline::tls
