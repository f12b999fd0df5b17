// A lane over a socket that is encrypted with TLS.
//
// If the socket accepts only part of a record, the rest must be written before any other data, and the caller must call
// `write` again. The lane therefore reports one byte less than it has encrypted, so that the caller passes this byte
// again as the remainder of its data.
#pragma once

#include "link/socket_lane.hpp"
#include "tls/socket.hpp"

namespace paceline::link {

class EncryptedLane final : public SocketLane {
  public:
    // Takes ownership of `socket`, an authenticated connection whose handshakes are complete.
    explicit EncryptedLane(tls::Socket socket);

    std::ptrdiff_t write(std::span<const ByteRange> ranges) override;
    std::ptrdiff_t read(std::span<const ByteRange> ranges) override;
    // Returns true if the session may have buffered more data than was requested from it.
    bool arm() override { return !is_drained_; }

  private:
    static constexpr std::size_t kRecordBytes = 16 << 10;

    std::unique_ptr<tls::Session> session_;
    std::array<std::uint8_t, kRecordBytes> record_;  // a record gathered from several ranges or partly sent
    std::size_t held_ = 0;                           // number of bytes of a partly sent record
    bool is_drained_ = false;                        // true if the session has no data until the socket is readable
};

// Returns a lane that takes ownership of `socket`.
std::unique_ptr<Lane> make_lane(tls::Socket socket);

}  // namespace paceline::link
