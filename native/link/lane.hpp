// A pipe of bytes to one peer and back: a socket, or two rings in shared memory. Nothing here blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "call/stream.hpp"

namespace paceline::link {

constexpr std::ptrdiff_t kClosed = -1;
constexpr std::size_t kMostPieces = 64;  // that one read or write looks at

class Lane {
  public:
    virtual ~Lane() = default;

    // The number of bytes taken, 0 when the peer must read first, kClosed when it is gone.
    virtual std::ptrdiff_t write(std::span<const Piece> pieces) = 0;
    // The number of bytes read, 0 when there are none, kClosed when the peer is gone and all it sent was read; without
    // pieces, one of the latter two.
    virtual std::ptrdiff_t read(std::span<const Piece> pieces) = 0;

    // Of a lane in memory: what can be read where it lies, up to the end of its ring; `consume` frees the front of it.
    // Every message on such a lane starts at a multiple of kMemoryAlignment.
    virtual bool in_memory() const { return false; }
    virtual std::span<const std::uint8_t> peek() { return {}; }
    virtual void consume(std::size_t /*nbytes*/) {}

    // To be called before sleeping: asks the peer for a sign when there is more to read, or room to write. True when
    // there is already.
    virtual bool arm() { return false; }

    // Whether the peer's machine has been silent for long though it should have answered.
    virtual bool silent() const { return false; }

    // Tells the peer that nothing more will come.
    virtual void finish() {}

    virtual int descriptor() const { return -1; }
};

constexpr std::size_t kMemoryAlignment = 64;

}  // namespace paceline::link
