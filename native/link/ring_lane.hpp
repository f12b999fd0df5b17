// A lane in shared memory: one ring for each direction, with one writer and one reader. `head` and `tail` count bytes
// and never wrap to the start of the ring. The writer writes the bytes before it releases `head`; the reader reads them
// before it releases `tail`. Before it sleeps, the reader sets `reader_waits` (the writer sets `writer_waits`) and
// checks the ring once more. The other side checks that flag after every store and wakes the sleeping rank through its
// doorbell.
#pragma once

#include <atomic>
#include <functional>

#include "link/lane.hpp"

namespace paceline::link {

// The counters of a ring. They are stored apart from the ring's bytes, so that a rank accesses fewer pages when it
// polls many rings.
struct RingCounters {
    alignas(128) std::atomic<std::uint64_t> head{0};
    alignas(128) std::atomic<std::uint64_t> tail{0};
    alignas(128) std::atomic<std::uint32_t> reader_waits{0};
    std::atomic<std::uint32_t> writer_waits{0};
    std::atomic<std::uint32_t> finished{0};  // released after the last `head`
};

struct Ring {
    RingCounters* counters;
    std::uint8_t* bytes;
    std::size_t nbytes;  // a power of two
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

class RingLane final : public Lane {
  public:
    // `wake_peer` wakes the peer's sleeping threads. `gone` returns true if the peer has died or left.
    RingLane(Ring outgoing, Ring incoming, std::function<void()> wake_peer, std::function<bool()> gone)
        : out_(outgoing), in_(incoming), wake_peer_(std::move(wake_peer)), gone_(std::move(gone)) {}

    std::ptrdiff_t write(std::span<const ByteRange> ranges) override;
    std::ptrdiff_t read(std::span<const ByteRange> ranges) override;
    bool is_shared_memory() const override { return true; }
    std::span<const std::uint8_t> peek() override;
    void consume(std::size_t nbytes) override;
    bool arm() override;
    void finish() override;

  private:
    std::ptrdiff_t empty_read_result() const;

    Ring out_;
    Ring in_;
    std::function<void()> wake_peer_;
    std::function<bool()> gone_;
    bool full_ = false;  // the last write found no room
};

}  // namespace paceline::link
