// Functions that claim, write, change and copy the entries in a recording; layout.hpp explains why this is safe.
#pragma once

#include <cstring>
#include <optional>

#include "record/layout.hpp"

namespace paceline::record {

constexpr int kMaxOpen = 64;   // maximum number of consecutive open or partly written entries that a claim skips
constexpr int kCopies = 1000;  // attempts to copy an entry; a write takes nanoseconds unless interrupted

// A writer's handle to an entry: its address and latest stamp. A null address means that the entry was not recorded;
// all operations on such a handle have no effect.
template <std::size_t N>
struct EntryHandle {
    Entry<N>* entry = nullptr;
    std::uint64_t stamp = 0;

    explicit operator bool() const { return entry != nullptr; }
};

// Claims the next entry in a ring for writing. The search starts at `next`, which may lag behind if several threads
// claim entries concurrently; the compare-exchange on the stamp resolves conflicts and makes an atomic increment of
// `next` unnecessary.
template <std::size_t N, std::size_t Capacity>
EntryHandle<N> claim(Word& next, Entry<N> (&ring)[Capacity]) {
    std::uint64_t index = next.load(std::memory_order_relaxed);
    for (int i = 0; i < kMaxOpen; ++index) {
        Entry<N>& entry = ring[index % Capacity];
        std::uint64_t old = entry.stamp.load(std::memory_order_relaxed);
        if (old != 0 && old >> kIndexShift >= index) continue;  // another thread has claimed this index
        ++i;
        if ((old & kStateMask) != 0) continue;
        const std::uint64_t stamp = index << kIndexShift | kWriting;
        if (entry.stamp.compare_exchange_strong(old, stamp, std::memory_order_acquire, std::memory_order_relaxed)) {
            next.store(index + 1, std::memory_order_relaxed);
            __builtin_prefetch(&ring[(index + 1) % Capacity], 1);  // the entry has probably left the L1 cache
            return {&entry, stamp};
        }
    }
    next.store(index, std::memory_order_relaxed);
    return {};
}

// Stores the words at index `first` and later; used if the preceding words have not changed.
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

// Finishes writing an entry. `state` is `kOpen` if the entry will be changed again, or 0.
template <std::size_t N>
void publish(EntryHandle<N>& handle, std::uint64_t state) {
    handle.stamp = ((handle.stamp & ~kStateMask) + kNextVersion) | state;
    handle.entry->stamp.store(handle.stamp, std::memory_order_release);
}

// Begins to change an open entry that only this thread writes.
template <std::size_t N>
void reopen_own(EntryHandle<N>& handle) {
    handle.stamp = (handle.stamp & ~kStateMask) | kWriting;
    handle.entry->stamp.store(handle.stamp, std::memory_order_relaxed);  // the fields are stored later, with release
}

// Begins to change an open entry that several threads may write; returns false if the entry has changed since `handle`
// was read.
template <std::size_t N>
bool reopen(EntryHandle<N>& handle) {
    std::uint64_t seen = handle.stamp;
    if ((seen & kStateMask) != kOpen) return false;
    const std::uint64_t writing = (seen & ~kStateMask) | kWriting;
    if (!handle.entry->stamp.compare_exchange_strong(seen, writing, std::memory_order_acquire,
                                                     std::memory_order_relaxed))
        return false;
    handle.stamp = writing;
    return true;
}

// Copies an entry's words to `out` and returns its stamp. Returns nullopt, with `out` incomplete, if no consistent copy
// could be made, for instance because the writer was killed while writing.
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
