// A non-blocking, bidirectional byte stream to one peer: a socket, or two rings in shared memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "call/byte_stream.hpp"

namespace paceline::link {

constexpr std::ptrdiff_t kClosed = -1;
constexpr std::size_t kMaxRanges = 64;  // maximum number of ranges per read or write

class Lane {
  public:
    virtual ~Lane() = default;

    // Returns the number of bytes accepted, 0 if the lane is full, or kClosed if the peer no longer uses the lane.
    virtual std::ptrdiff_t write(std::span<const ByteRange> ranges) = 0;
    // Returns the number of bytes read, 0 if no data is available, or kClosed if the peer no longer uses the lane and
    // all of its data has been read. If `ranges` is empty, returns either 0 or kClosed.
    virtual std::ptrdiff_t read(std::span<const ByteRange> ranges) = 0;

    // A lane in shared memory supports reading in place: `peek` returns the available bytes up to the end of the ring,
    // and `consume` frees bytes at the front. Every message on such a lane starts at a multiple of kMemoryAlignment.
    virtual bool is_shared_memory() const { return false; }
    virtual std::span<const std::uint8_t> peek() { return {}; }
    virtual void consume(std::size_t /*nbytes*/) {}

    // Must be called before sleeping. Requests a wake-up from the peer when there is data to read or room to write;
    // returns true if data or room is already available.
    virtual bool arm() { return false; }

    // Returns true if a response from the peer's machine has been overdue for a long time.
    virtual bool silent() const { return false; }

    // Signals the end of the data to the peer.
    virtual void finish() {}
    // After `finish`, returns true once the peer's machine has received all data or can no longer receive it. Closing
    // the lane earlier may lose data in flight, because the kernel answers data that arrives after the close with a
    // reset.
    virtual bool delivered() const { return true; }

    virtual int descriptor() const { return -1; }
};

constexpr std::size_t kMemoryAlignment = 64;

}  // namespace paceline::link
