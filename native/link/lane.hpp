// A bidirectional byte stream to one peer: a socket, or two rings in shared memory. None of its functions blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "call/stream.hpp"

namespace paceline::link {

constexpr std::ptrdiff_t kClosed = -1;
constexpr std::size_t kMostPieces = 64;  // the most pieces that one read or write uses

class Lane {
  public:
    virtual ~Lane() = default;

    // Returns the number of bytes accepted, 0 if the peer must read first, or kClosed if it is gone.
    virtual std::ptrdiff_t write(std::span<const Piece> pieces) = 0;
    // Returns the number of bytes read, 0 if there are none, or kClosed if the peer is gone and everything that it sent
    // has been read. Without pieces it returns 0 or kClosed.
    virtual std::ptrdiff_t read(std::span<const Piece> pieces) = 0;

    // On a lane in shared memory, the reader can use the bytes in place: `peek` returns the bytes up to the end of the
    // ring, and `consume` frees the first of them. Every message on such a lane starts at a multiple of
    // kMemoryAlignment.
    virtual bool in_memory() const { return false; }
    virtual std::span<const std::uint8_t> peek() { return {}; }
    virtual void consume(std::size_t /*nbytes*/) {}

    // Must be called before sleeping: requests a wake-up from the peer when there is more to read or room to write.
    // Returns true if there already is.
    virtual bool arm() { return false; }

    // Whether the peer's machine has not responded for a long time, although a response is due.
    virtual bool silent() const { return false; }

    // Reports to the peer that no more data will follow.
    virtual void finish() {}
    // After `finish`: whether the peer's machine has received all data, or never will. A lane that is closed earlier
    // may lose data in flight: the kernel answers data that arrives after the close with a reset.
    virtual bool delivered() const { return true; }

    virtual int descriptor() const { return -1; }
};

constexpr std::size_t kMemoryAlignment = 64;

}  // namespace paceline::link
