// A lane over a socket whose bytes TLS encrypts, record by record.
//
// A record that the socket takes only in part is under way all the same, so the lane has to be asked again until all of
// it has gone, whatever the writer wants to say next. Therefore the lane holds back the last byte of such a record: it
// reports one byte less than it has encrypted, and whoever writes offers that byte again, as the rest of what it has
// begun.
#pragma once

#include "link/socket_lane.hpp"
#include "tls/socket.hpp"

namespace paceline::link {

class EncryptedLane final : public SocketLane {
  public:
    // Takes over `socket`, an authenticated connection whose handshakes are over.
    explicit EncryptedLane(tls::Socket socket);

    std::ptrdiff_t write(std::span<const Piece> pieces) override;
    std::ptrdiff_t read(std::span<const Piece> pieces) override;
    // The session may have read more from the socket than has been asked of it.
    bool arm() override { return !is_dry_; }

  private:
    static constexpr std::size_t kRecordBytes = 16 << 10;

    std::unique_ptr<tls::Session> session_;
    std::array<std::uint8_t, kRecordBytes> record_;  // made of several pieces, or not sent entirely yet
    std::size_t held_ = 0;                           // the bytes of the record that is not sent entirely yet
    bool is_dry_ = false;                            // the session has nothing to read until the socket has
};

// Returns a lane over `socket`, which it takes over.
std::unique_ptr<Lane> lane_over(tls::Socket socket);

}  // namespace paceline::link
