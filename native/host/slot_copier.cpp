#include "host/slot_copier.hpp"

#include <bit>
#include <cstring>
#include <tuple>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace paceline::host {
namespace {

// Returns the index of `operation` among the measured operations, or an index past the end for other operations. In a
// measured operation, all ranks stage and read in the same way.
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

std::pair<CopyMethod, bool> CopyMethodSelector::next() {
    const std::uint32_t every = calls_ < kInitialCalls ? kInitialPeriod : kPeriod;
    const std::uint32_t at = calls_ % every;
    ++calls_;
    if (at == every / 2) return {CopyMethod::cached, true};
    if (at == every - 1) return {CopyMethod::streamed, true};
    return {best_, false};
}

void CopyMethodSelector::add_measurement(CopyMethod method, float ticks_per_byte) {
    Timings& timings = timings_[static_cast<std::size_t>(method)];
    timings.latest[timings.count++ % kKeptMeasurements] = ticks_per_byte;
    const auto& [cached, streamed] = timings_;
    if (cached.count == 0 || streamed.count == 0) return;
    best_ = streamed.least() < kStreamedThreshold * cached.least() ? CopyMethod::streamed : CopyMethod::cached;
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

void SlotCopier::begin(Operation operation, std::size_t nbytes) {
    selector_ = nullptr;
    method_ = CopyMethod::cached;
    is_measured_ = false;
    const std::size_t number = number_of(operation);
    if (!kCanStream || nbytes < kMin || number >= kOperations) return;
    const auto size = static_cast<std::size_t>(std::bit_width(nbytes / kMin)) - 1;
    selector_ = &selectors_[number][std::min(size, kSizes - 1)];
    std::tie(method_, is_measured_) = selector_->next();
    nbytes_ = nbytes;
    ticks_ = 0;
}

void SlotCopier::end() {
    if (is_measured_ && ticks_ != 0)
        selector_->add_measurement(method_, static_cast<float>(ticks_) / static_cast<float>(nbytes_));
    is_measured_ = false;
}

void SlotCopier::stage_next(ByteStream& from, std::uint8_t* slot, std::size_t nbytes) const {
    if (method_ == CopyMethod::cached) {
        from.copy_to(slot, nbytes);
        return;
    }
    from.next(nbytes, [slot](const std::uint8_t* data, std::size_t n, std::size_t done) {
        copy_streamed(slot + done, data, n);
    });
}

void SlotCopier::stage(const ByteStream& from, std::uint8_t* slot, std::size_t nbytes) const {
    if (method_ == CopyMethod::cached) {
        from.peek_to(slot, nbytes);
    } else {
        ByteStream copy = from;
        stage_next(copy, slot, nbytes);
    }
}

}  // namespace paceline::host
