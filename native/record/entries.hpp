// How entries of a recording are claimed, written, changed and copied; layout.hpp says why that is safe.
#pragma once

#include <cstring>
#include <optional>

#include "record/layout.hpp"

namespace paceline::record {

constexpr int kMostOpen = 64;  // entries in a row that are open or being written, which a claim passes over
constexpr int kCopies = 1000;  // a writer needs nanoseconds, unless it is interrupted in the middle

// An entry that its writer may change: its place and its latest stamp. Without an entry it stands for one that was not
// recorded, and whatever is done with it does nothing.
template <std::size_t N>
struct Written {
    Entry<N>* entry = nullptr;
    std::uint64_t stamp = 0;

    explicit operator bool() const { return entry != nullptr; }
};

// Claims the next place of a ring for writing. `next` is where to look for it: the index behind the latest claim, or an
// earlier one if several threads claim at once. The exchange alone decides, which saves a second atomic operation.
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
            __builtin_prefetch(&ring[(index + 1) % Capacity], 1);  // it has left the nearest cache since the last round
            return {&entry, stamp};
        }
    }
    next.store(index, std::memory_order_relaxed);
    return {};
}

// Stores the words from `first` on, for entries of which the others do not change.
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

// Ends the writing of an entry; `state` is `kOpen` if it will be changed again, otherwise 0.
template <std::size_t N>
void publish(Written<N>& written, std::uint64_t state) {
    written.stamp = ((written.stamp & ~kStateMask) + kNextVersion) | state;
    written.entry->stamp.store(written.stamp, std::memory_order_release);
}

// Begins to change an open entry of which this writer is the only one.
template <std::size_t N>
void reopen_own(Written<N>& written) {
    written.stamp = (written.stamp & ~kStateMask) | kWriting;
    written.entry->stamp.store(written.stamp, std::memory_order_relaxed);  // before the fields, which are released
}

// Begins to change an open entry that several threads may have the stamp of; false if it has been changed since.
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

// Copies an entry's stamp and words to `out`; nullopt if it is being written all the time, as one is forever whose
// writer was killed. `out` is then not whole.
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
