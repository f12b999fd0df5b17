#include "link/ring_lane.hpp"

#include <algorithm>

namespace paceline::link {
namespace {

constexpr std::size_t kPublishInterval = 32 << 10;  // bytes between updates of `head` during a write

}  // namespace

std::ptrdiff_t RingLane::write(std::span<const ByteRange> ranges) {
    std::uint64_t head = out_.counters->head.load(std::memory_order_relaxed);
    std::uint64_t room = out_.nbytes - (head - out_.counters->tail.load(std::memory_order_acquire));
    std::size_t written = 0;
    std::size_t wanted = 0;
    for (const ByteRange& range : ranges) {
        wanted += range.nbytes;
        for (std::size_t at = 0; at < range.nbytes && room != 0;) {
            const std::size_t to = head & (out_.nbytes - 1);
            const std::size_t n = std::min({range.nbytes - at, std::size_t{room}, out_.nbytes - to, kPublishInterval});
            std::memcpy(out_.bytes + to, range.data + at, n);
            at += n;
            written += n;
            head += n;
            room -= n;
            if (written % kPublishInterval == 0 || n == kPublishInterval)
                out_.counters->head.store(head, std::memory_order_release);
        }
        if (room == 0) break;
    }
    full_ = written < wanted;
    if (written != 0) {
        // seq_cst, paired with the reader's store and second check in arm(): at least one side reads the other's store.
        out_.counters->head.store(head, std::memory_order_seq_cst);
        if (out_.counters->reader_waits.load(std::memory_order_seq_cst) != 0 &&
            out_.counters->reader_waits.exchange(0, std::memory_order_relaxed) != 0)
            wake_peer_();
        return static_cast<std::ptrdiff_t>(written);
    }
    // A peer that has finished writing has also stopped reading.
    const bool over = in_.counters->finished.load(std::memory_order_acquire) != 0 || gone_();
    return wanted != 0 && over ? kClosed : 0;
}

std::ptrdiff_t RingLane::read(std::span<const ByteRange> ranges) {
    if (ranges.empty()) return empty_read_result();
    std::size_t taken = 0;
    for (const ByteRange& range : ranges) {
        for (std::size_t at = 0; at < range.nbytes;) {
            const std::span<const std::uint8_t> there = peek();
            if (there.empty()) return taken != 0 ? static_cast<std::ptrdiff_t>(taken) : empty_read_result();
            const std::size_t n = std::min(there.size(), range.nbytes - at);
            std::memcpy(range.data + at, there.data(), n);
            consume(n);
            at += n;
            taken += n;
        }
    }
    return static_cast<std::ptrdiff_t>(taken);
}

// Returns kClosed if the stream has ended, otherwise 0. Called when the ring was empty.
std::ptrdiff_t RingLane::empty_read_result() const {
    const bool over = in_.counters->finished.load(std::memory_order_acquire) != 0 || gone_();
    // All data written before the end of the stream is visible at this point.
    const bool empty =
        in_.counters->head.load(std::memory_order_acquire) == in_.counters->tail.load(std::memory_order_relaxed);
    return over && empty ? kClosed : 0;
}

std::span<const std::uint8_t> RingLane::peek() {
    const std::uint64_t tail = in_.counters->tail.load(std::memory_order_relaxed);
    const std::uint64_t there =
        std::min<std::uint64_t>(in_.counters->head.load(std::memory_order_acquire) - tail, in_.nbytes);
    const std::size_t from = tail & (in_.nbytes - 1);
    return {in_.bytes + from, std::min<std::size_t>(there, in_.nbytes - from)};
}

void RingLane::consume(std::size_t nbytes) {
    const std::uint64_t tail = in_.counters->tail.load(std::memory_order_relaxed) + nbytes;
    // seq_cst, paired with the writer's store and second check in arm(), as in `write`.
    in_.counters->tail.store(tail, std::memory_order_seq_cst);
    if (in_.counters->writer_waits.load(std::memory_order_seq_cst) != 0 &&
        in_.counters->writer_waits.exchange(0, std::memory_order_relaxed) != 0)
        wake_peer_();
}

bool RingLane::arm() {
    in_.counters->reader_waits.store(1, std::memory_order_seq_cst);
    if (in_.counters->head.load(std::memory_order_seq_cst) != in_.counters->tail.load(std::memory_order_relaxed))
        return true;
    if (!full_) return false;
    out_.counters->writer_waits.store(1, std::memory_order_seq_cst);
    const std::uint64_t used =
        out_.counters->head.load(std::memory_order_relaxed) - out_.counters->tail.load(std::memory_order_seq_cst);
    return used < out_.nbytes;
}

void RingLane::finish() {
    out_.counters->finished.store(1, std::memory_order_release);
    wake_peer_();
}

}  // namespace paceline::link
