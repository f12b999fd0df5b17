// Functions that claim, write, change and copy the entries of a recording; layout.hpp explains why this is safe.
#pragma once

#include <cstring>
#include <optional>

#include "record/layout.hpp"

namespace paceline::record {

constexpr int kMostOpen = 64;  // the most consecutive open or partly written entries that a claim skips
constexpr int kCopies = 1000;  // the attempts to copy an entry; a writer needs nanoseconds unless it is interrupted

// An entry that its writer may change: its place and its latest stamp. Without a place it represents an entry that was
// not recorded, and all operations on it do nothing.
template <std::size_t N>
struct Written {
    Entry<N>* entry = nullptr;
    std::uint64_t stamp = 0;

    explicit operator bool() const { return entry != nullptr; }
};

// Claims the next place of a ring for writing. The search begins at `next`, which is the index after the latest claim,
// or an earlier one if several threads claim at once. Only the exchange decides, which saves a second atomic operation.
template <std::size_t N, std::size_t Capacity>
Written<N> claim(Word& next, Entry<N> (&ring)[Capacity]) {
    std::uint64_t index = next.load(std::memory_order_relaxed);
    for (int i = 0; i < kMostOpen; ++index) {
        Entry<N>& entry = ring[index % Capacity];
        std::uint64_t old = entry.stamp.load(std::memory_order_relaxed);
        if (old != 0 && old >> kIndexShift >= index) continue;  // another thread has claimed this index
        ++i;
        if ((old & kStateMask) != 0) continue;
        const std::uint64_t stamp = index << kIndexShift | kWriting;
        if (entry.stamp.compare_exchange_strong(old, stamp, std::memory_order_acquire, std::memory_order_relaxed)) {
            next.store(index + 1, std::memory_order_relaxed);
            __builtin_prefetch(&ring[(index + 1) % Capacity], 1);  // it has left the L1 cache since the last round
            return {&entry, stamp};
        }
    }
    next.store(index, std::memory_order_relaxed);
    return {};
}

// Stores the words from `first` on, for entries whose other words do not change.
template <class Fields, std::size_t N>
void fill_from(Entry<N>& entry, const Fields& fields, std::size_t first) {
    std::uint64_t words[N];
    std::memcpy(words, &fields, sizeof words);
    for (std::size_t i = first; i < N; ++i) entry.words[i].store(words[i], std::memory_order_release);
}

// Stores all fields of an entry that is being written.
template <class Fields, std::size_t N>
void fill(Entry<N>& entry, const Fields& fields) {
    static_assert(sizeof(Fields) == N * sizeof(std::uint64_t) && std::is_trivially_copyable_v<Fields>);
    fill_from(entry, fields, 0);
}

// Ends the writing of an entry; `state` is `kOpen` if the entry will be changed again, otherwise 0.
template <std::size_t N>
void publish(Written<N>& written, std::uint64_t state) {
    written.stamp = ((written.stamp & ~kStateMask) + kNextVersion) | state;
    written.entry->stamp.store(written.stamp, std::memory_order_release);
}

// Begins to change an open entry that has no other writer.
template <std::size_t N>
void reopen_own(Written<N>& written) {
    written.stamp = (written.stamp & ~kStateMask) | kWriting;
    written.entry->stamp.store(written.stamp, std::memory_order_relaxed);  // before the fields, which are released
}

// Begins to change an open entry whose stamp several threads may have; returns false if it has changed since then.
template <std::size_t N>
bool reopen(Written<N>& written) {
    std::uint64_t seen = written.stamp;
    if ((seen & kStateMask) != kOpen) return false;
    const std::uint64_t writing = (seen & ~kStateMask) | kWriting;
    if (!written.entry->stamp.compare_exchange_strong(seen, writing, std::memory_order_acquire,
                                                      std::memory_order_relaxed))
        return false;
    written.stamp = writing;
    return true;
}

// Copies an entry's stamp and words to `out`. Returns nullopt, with `out` incomplete, if the entry is being written all
// the time, for instance because its writer was killed.
template <std::size_t N>
std::optional<std::uint64_t> copy(const Entry<N>& entry, std::uint64_t (&out)[N]) {
    for (int i = 0; i < kCopies; ++i) {
        const std::uint64_t before = entry.stamp.load(std::memory_order_acquire);
        if ((before & kStateMask) == kWriting) continue;
        for (std::size_t w = 0; w < N; ++w) out[w] = entry.words[w].load(std::memory_order_acquire);
        if (entry.stamp.load(std::memory_order_relaxed) == before) return before;
    }
    return std::nullopt;
}

}  // namespace paceline::record
