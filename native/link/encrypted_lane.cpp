#include "link/encrypted_lane.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace paceline::link {
namespace {

// A position in a list of ranges.
class Cursor {
  public:
    explicit Cursor(std::span<const ByteRange> ranges) : ranges_(ranges) { pass_empty(); }

    bool at_end() const { return next_ == ranges_.size(); }
    ByteRange rest() const { return {ranges_[next_].data + done_, ranges_[next_].nbytes - done_}; }

    void advance(std::size_t nbytes) {
        done_ += nbytes;
        pass_empty();
    }

  private:
    void pass_empty() {
        for (; next_ < ranges_.size() && done_ == ranges_[next_].nbytes; ++next_) done_ = 0;
    }

    std::span<const ByteRange> ranges_;
    std::size_t next_ = 0;
    std::size_t done_ = 0;  // number of bytes in range `next_` before the cursor
};

// Copies the next bytes into `record`; returns the number of bytes copied.
std::size_t gather(Cursor& from, std::span<std::uint8_t> record) {
    std::size_t have = 0;
    while (have < record.size() && !from.at_end()) {
        const ByteRange range = from.rest();
        const std::size_t n = std::min(range.nbytes, record.size() - have);
        std::memcpy(record.data() + have, range.data, n);
        from.advance(n);
        have += n;
    }
    return have;
}

}  // namespace

EncryptedLane::EncryptedLane(tls::Socket socket) : SocketLane(socket.descriptor), session_(std::move(socket.session)) {
    session_->read_ahead();
}

std::ptrdiff_t EncryptedLane::write(std::span<const ByteRange> ranges) {
    Cursor from(ranges);
    std::ptrdiff_t accepted = 0;
    if (from.at_end()) return 0;
    if (held_ != 0) {
        if (session_->send(record_.data(), held_) < 0) return errno == EAGAIN ? 0 : kClosed;
        held_ = 0;
        from.advance(1);
        accepted = 1;
    }
    while (!from.at_end()) {
        const ByteRange next = from.rest();
        const bool is_whole = next.nbytes >= kRecordBytes;  // a full, contiguous record needs no copy
        std::size_t nbytes = kRecordBytes;
        if (is_whole)
            from.advance(nbytes);
        else
            nbytes = gather(from, record_);
        if (session_->send(is_whole ? next.data : record_.data(), nbytes) > 0) {
            accepted += static_cast<std::ptrdiff_t>(nbytes);
            continue;
        }
        if (errno != EAGAIN) return accepted != 0 ? accepted : kClosed;
        if (is_whole) std::memcpy(record_.data(), next.data, nbytes);
        held_ = nbytes;
        return accepted + static_cast<std::ptrdiff_t>(nbytes) - 1;
    }
    return accepted;
}

std::ptrdiff_t EncryptedLane::read(std::span<const ByteRange> ranges) {
    std::ptrdiff_t got = 0;
    for (Cursor to(ranges); !to.at_end();) {
        const ByteRange into = to.rest();
        const ssize_t n = session_->recv(into.data, into.nbytes);
        if (n > 0) {
            to.advance(static_cast<std::size_t>(n));
            got += n;
            continue;
        }
        is_drained_ = true;
        return n < 0 && errno == EAGAIN ? got : got != 0 ? got : kClosed;
    }
    is_drained_ = false;
    return got;
}

std::unique_ptr<Lane> make_lane(tls::Socket socket) {
    if (socket.session) return std::make_unique<EncryptedLane>(std::move(socket));
    return std::make_unique<SocketLane>(socket.descriptor);
}

}  // namespace paceline::link
