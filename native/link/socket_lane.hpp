// A lane over a connected stream socket. Small reads also read ahead, so that a message's header and body usually
// arrive with one system call; large reads go directly into the tensor.
#pragma once

#include <array>
#include <chrono>

#include "link/lane.hpp"
#include "process/fork_guard.hpp"

namespace paceline::link {

class SocketLane : public Lane {
  public:
    // Takes ownership of `socket`, an authenticated connection.
    explicit SocketLane(int socket);
    SocketLane(const SocketLane&) = delete;
    SocketLane& operator=(const SocketLane&) = delete;
    ~SocketLane() override;

    std::ptrdiff_t write(std::span<const ByteRange> ranges) override;
    std::ptrdiff_t read(std::span<const ByteRange> ranges) override;
    bool arm() override { return ahead_from_ != ahead_to_; }
    bool silent() const override;
    void finish() override;
    bool delivered() const override;
    int descriptor() const override { return socket_; }

  private:
    int socket_;
    std::array<std::uint8_t, 16 << 10> ahead_;  // bytes read ahead of the caller's requests
    std::size_t ahead_from_ = 0;
    std::size_t ahead_to_ = 0;
    ForkGuard guard_;
};

}  // namespace paceline::link
