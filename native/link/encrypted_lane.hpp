// A lane over a socket whose bytes TLS encrypts, record by record.
//
// A record of which the socket accepts only a part must be completed before any other data, so the lane has to be
// called again until the whole record has been written. The lane therefore holds back the last byte of such a record:
// it reports one byte less than it has encrypted, and the writer offers this byte again, as the rest of the data that
// it has begun to write.
#pragma once

#include "link/socket_lane.hpp"
#include "tls/socket.hpp"

namespace paceline::link {

class EncryptedLane final : public SocketLane {
  public:
    // Takes ownership of `socket`, an authenticated connection whose handshakes are complete.
    explicit EncryptedLane(tls::Socket socket);

    std::ptrdiff_t write(std::span<const Piece> pieces) override;
    std::ptrdiff_t read(std::span<const Piece> pieces) override;
    // The session may have read more from the socket than has been requested.
    bool arm() override { return !is_dry_; }

  private:
    static constexpr std::size_t kRecordBytes = 16 << 10;

    std::unique_ptr<tls::Session> session_;
    std::array<std::uint8_t, kRecordBytes> record_;  // gathered from several pieces, or not sent completely yet
    std::size_t held_ = 0;                           // the bytes of a record that is not sent completely yet
    bool is_dry_ = false;                            // the session has no data to read until the socket has
};

// Returns a lane over `socket`, of which it takes ownership.
std::unique_ptr<Lane> lane_over(tls::Socket socket);

}  // namespace paceline::link
