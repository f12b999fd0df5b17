#include "host/slot_copier.hpp"

#include <bit>
#include <cstring>
#include <tuple>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace paceline::host {
namespace {

// Returns the index of `operation` among the measured operations, those in which all ranks stage and read in the same
// way. Returns an index past the end for other operations.
std::size_t number_of(Operation operation) {
    switch (operation) {
        case Operation::all_reduce:
            return 0;
        case Operation::all_gather:
            return 1;
        case Operation::reduce_scatter:
            return 2;
        default:
            return 3;
    }
}

}  // namespace

std::pair<Way, bool> Experience::next() {
    const std::uint32_t every = calls_ < kEarly ? kEarlyEvery : kLaterEvery;
    const std::uint32_t at = calls_ % every;
    ++calls_;
    if (at == every / 2) return {Way::cached, true};
    if (at == every - 1) return {Way::streamed, true};
    return {best_, false};
}

void Experience::learn(Way way, float ticks_per_byte) {
    Times& times = times_[static_cast<std::size_t>(way)];
    times.latest[times.count++ % kKept] = ticks_per_byte;
    const auto& [cached, streamed] = times_;
    if (cached.count == 0 || streamed.count == 0) return;
    best_ = streamed.least() < kWorth * cached.least() ? Way::streamed : Way::cached;
}

void copy_streamed(std::uint8_t* to, const std::uint8_t* from, std::size_t nbytes) {
#if defined(__x86_64__)
    const std::size_t before = std::min(nbytes, (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine);
    std::memcpy(to, from, before);
    std::size_t at = before;
    for (; nbytes - at >= kLine; at += kLine)
        for (std::size_t within = 0; within < kLine; within += sizeof(__m128i))
            _mm_stream_si128(reinterpret_cast<__m128i*>(to + at + within),
                             _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at + within)));
    std::memcpy(to + at, from + at, nbytes - at);
    _mm_sfence();
#else
    std::memcpy(to, from, nbytes);
#endif
}

void Copying::begin(Operation operation, std::size_t nbytes) {
    experience_ = nullptr;
    way_ = Way::cached;
    is_measured_ = false;
    const std::size_t number = number_of(operation);
    if (!kCanStream || nbytes < kMin || number >= kOperations) return;
    const auto size = static_cast<std::size_t>(std::bit_width(nbytes / kMin)) - 1;
    experience_ = &experiences_[number][std::min(size, kSizes - 1)];
    std::tie(way_, is_measured_) = experience_->next();
    nbytes_ = nbytes;
    ticks_ = 0;
}

void Copying::end() {
    if (is_measured_ && ticks_ != 0) experience_->learn(way_, static_cast<float>(ticks_) / static_cast<float>(nbytes_));
    is_measured_ = false;
}

void Copying::stage_next(ByteStream& from, std::uint8_t* slot, std::size_t nbytes) const {
    if (way_ == Way::cached) {
        from.copy_to(slot, nbytes);
        return;
    }
    from.next(nbytes, [slot](const std::uint8_t* data, std::size_t n, std::size_t done) {
        copy_streamed(slot + done, data, n);
    });
}

void Copying::stage(const ByteStream& from, std::uint8_t* slot, std::size_t nbytes) const {
    if (way_ == Way::cached) {
        from.peek_to(slot, nbytes);
    } else {
        ByteStream copy = from;
        stage_next(copy, slot, nbytes);
    }
}

}  // namespace paceline::host
