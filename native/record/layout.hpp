// The memory layout of a recording, which contains the latest activity of a process. Other processes can read it while
// it is being written and after its writer was killed. src/paceline/comm/record/layout.py describes the same layout in
// Python.
//
// Every entry in a table begins with a stamp: index << 8 | version << 2 | state. A writer claims an entry by setting
// its state to `kWriting`, stores the fields, and stores a stamp with the next version and the state `kOpen` (it will
// change again) or 0 (complete). All fields are stored with release and loaded with acquire, so a reader that loads a
// new field also loads a changed stamp afterward. A copy is therefore consistent if the stamp is the same before and
// after. An open entry keeps its place when the ring wraps around; new entries skip it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace paceline::record {

using Word = std::atomic<std::uint64_t>;
static_assert(sizeof(Word) == 8 && Word::is_always_lock_free);

constexpr std::uint64_t kMagic = 0x44524f4345524c50;  // "PLRECORD"
constexpr std::uint32_t kVersion = 2;
constexpr std::uint64_t kStateMask = 3;
constexpr std::uint64_t kWriting = 1;
constexpr std::uint64_t kOpen = 2;
constexpr std::uint64_t kNextVersion = 4;
constexpr unsigned kIndexShift = 8;
constexpr std::uint32_t kEnded = 1;  // in Header::flags

constexpr std::uint32_t kPairs = 64;
constexpr std::uint32_t kNames = 512;
constexpr std::uint32_t kGroups = 64;
constexpr std::uint32_t kCalls = 4096;
constexpr std::uint32_t kEvents = 16384;
constexpr std::uint32_t kLinks = 256;
constexpr std::uint32_t kValue = 2;  // the event kind whose `first` contains the bits of a double
constexpr std::size_t kNameBytes = 64;
constexpr unsigned kLineBits = 22;        // bits for the line in `CallFields::site`
constexpr std::size_t kMaxMembers = 224;  // the largest group whose members are listed

template <std::size_t N>
struct Entry {
    Word stamp;
    Word words[N];
};

// Text, padded with zeros.
template <std::size_t N>
struct Text {
    Word words[N / sizeof(std::uint64_t)];
};

struct Table {
    std::uint32_t offset;
    std::uint32_t capacity;
};

struct Header {
    Word magic;  // stored last when a recording is initialized
    std::uint32_t version;
    std::uint32_t header_bytes;
    std::uint64_t nbytes;
    Table pairs, names, groups, calls, events;
    std::atomic<std::uint32_t> pid;  // the process that has claimed the memory
    std::atomic<std::int32_t> rank;
    std::atomic<std::int32_t> world_size;
    std::uint32_t clock_kind;
    std::atomic<std::uint32_t> flags;
    std::atomic<std::uint32_t> links_used;  // number of link entries in use, including those of closed links
    std::uint64_t ticks_per_s;              // 0: unknown
    std::uint64_t time_namespace;
    Word pair_count;
    Word name_count;
    Table links;
    alignas(64) Word calls_begun;
    alignas(64) Word events_begun;
    alignas(64) Word latest_tick;
    Word step;
    alignas(256) Text<128> worker;
    Text<128> host;
    Text<64> boot;
};
static_assert(offsetof(Header, pid) == 64 && offsetof(Header, ticks_per_s) == 88);
static_assert(offsetof(Header, links_used) == 84 && offsetof(Header, links) == 120);
static_assert(offsetof(Header, calls_begun) == 128 && offsetof(Header, events_begun) == 192);
static_assert(offsetof(Header, latest_tick) == 256 && offsetof(Header, worker) == 512 && offsetof(Header, boot) == 768);

struct PairFields {  // the same instant on all clocks
    std::uint64_t tick;
    std::int64_t monotonic_ns;
    std::int64_t realtime_ns;
};

struct GroupFields {
    std::uint32_t serial;
    std::uint32_t size;
    std::int32_t rank;
    std::uint32_t name;
    std::uint64_t identity;
    std::uint32_t listed;
    std::uint32_t engine;
    std::uint64_t opened;
    std::uint64_t closed;
    std::uint64_t spare;
    std::uint16_t members[kMaxMembers];
};

enum class CallState : std::uint8_t { pending, running, done, failed };

struct CallFields {
    std::uint32_t group = 0;
    std::uint8_t operation = 0;
    std::uint8_t dtype = 0;
    std::uint8_t reduce_op = 0;
    std::uint8_t algorithm = 0;
    std::uint64_t sequence = 0;
    std::uint64_t count = 0;
    std::int32_t root = -1;  // for a point-to-point message, the other rank
    CallState state = CallState::pending;
    std::uint8_t outcome = 0;
    std::uint8_t is_async = 0;
    std::uint8_t spare = 0;
    std::uint64_t arrived = 0;  // in ticks; 0 until it happens
    std::uint64_t started = 0;
    std::uint64_t ended = 0;
    std::uint64_t shm_nbytes = 0;
    std::uint64_t tcp_nbytes = 0;
    std::int32_t last_arrived = -1;
    std::uint32_t first_missing = 0;
    std::uint32_t step = 0;
    std::uint32_t thread = 0;
    std::int32_t tag = -1;
    std::uint32_t site = 0;  // the line that makes the call: number of the file's name << kLineBits | line; 0: unknown
    std::uint64_t complete = 0;
    std::uint64_t missing = 0;      // bit mask of the missing ranks; bit 0 is `first_missing`
    std::int64_t predicted_ns = 0;  // 0: no prediction
};

struct EventFields {
    std::uint32_t kind = 0;
    std::uint32_t name = 0;
    std::uint64_t start = 0;
    std::uint64_t end = 0;
    std::int64_t first = 0;
    std::int64_t second = 0;
    std::uint64_t sent = 0;
    std::uint32_t step = 0;
    std::uint32_t thread = 0;
};

// The kernel's statistics for one group's connections to one peer, overwritten by every measurement.
struct LinkFields {
    std::uint32_t group = 0;
    std::int32_t peer = -1;         // the peer's global rank
    std::uint64_t measured = 0;     // in ticks
    std::uint64_t sent_nbytes = 0;  // the bytes that the peer's kernel has acknowledged
    std::uint64_t received_nbytes = 0;
    std::uint64_t segments = 0;      // the segments sent with data
    std::uint64_t nbytes_per_s = 0;  // the latest delivery rate
    std::uint64_t busy_us = 0;       // the time with data in flight
    std::uint64_t held_us = 0;       // the part of `busy_us` in which the peer's receive window was full
    std::uint32_t round_trip_us = 0;
    std::uint32_t variation_us = 0;  // the variation in the round-trip time
    std::uint32_t least_round_trip_us = 0;
    std::uint32_t retransmits = 0;  // the segments sent again
    std::uint32_t silent_ms = 0;    // the time for which a response from the peer's kernel has been overdue
    std::uint32_t connections = 0;
};

// The entry type for a struct of fields.
template <class Fields>
using EntryOf = Entry<sizeof(Fields) / sizeof(std::uint64_t)>;

struct Recording {
    Header header;
    alignas(4096) EntryOf<PairFields> pairs[kPairs];
    alignas(4096) Text<kNameBytes> names[kNames];
    EntryOf<GroupFields> groups[kGroups];
    EntryOf<CallFields> calls[kCalls];
    EntryOf<EventFields> events[kEvents];
    EntryOf<LinkFields> links[kLinks];
};
static_assert(sizeof(EntryOf<PairFields>) == 32 && sizeof(EntryOf<GroupFields>) == 512);
static_assert(sizeof(EntryOf<CallFields>) == 128 && sizeof(EntryOf<EventFields>) == 64);
static_assert(sizeof(EntryOf<LinkFields>) == 96);
static_assert(std::is_standard_layout_v<Recording>);
// The size of the recording without the padding at its end.
constexpr std::size_t kBytes = offsetof(Recording, links) + sizeof(Recording::links);

}  // namespace paceline::record
